// The pool: an atomic count of indices not yet taken is all that the threads compete for.
#include "threads.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <climits>
#include <system_error>
#include <thread>

namespace baton {
namespace {

constexpr std::chrono::microseconds AWAKE{40};  // longer than what lies between two products of a layer
constexpr int LOOKS_PER_CLOCK = 32;
constexpr int MOST_THREADS = 255;
constexpr int64_t MOST_INDICES = int64_t{1} << 32;

void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

void sleep_while(std::atomic<uint32_t>& word, uint32_t value) {
    syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
}

void wake(std::atomic<uint32_t>& word) { syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0); }

// Whether the condition came true before it was time to sleep.
template <class Condition>
bool await(const Condition& condition) {
    const auto end = std::chrono::steady_clock::now() + AWAKE;
    do {
        for (int look = 0; look < LOOKS_PER_CLOCK; ++look) {
            if (condition()) return true;
            relax();
        }
    } while (std::chrono::steady_clock::now() < end);
    return condition();
}

class Pool {
   public:
    void run(int64_t count, int threads, Task task, const void* work) {
        threads = std::min(threads, MOST_THREADS);
        if (count >= MOST_INDICES || busy_.test_and_set(std::memory_order_acquire)) return do_alone(count, task, work);
        if (has_helpers(threads - 1)) {
            do_together(count, threads, task, work);
        } else {
            do_alone(count, task, work);
        }
        busy_.clear(std::memory_order_release);
    }

   private:
    static void do_alone(int64_t count, Task task, const void* work) {
        for (int64_t index = 0; index < count; ++index) task(work, index);
    }

    void do_together(int64_t count, int threads, Task task, const void* work) {
        task_ = task, work_ = work, count_ = count;
        unfinished_.store(static_cast<uint32_t>(count), std::memory_order_relaxed);
        left_.store(static_cast<uint64_t>(threads) << 32 | static_cast<uint64_t>(count));
        calls_.fetch_add(1);
        if (sleeping_.load() > 0) wake(calls_);
        while (take_one(0)) {
        }
        const auto is_finished = [this] { return unfinished_.load(std::memory_order_acquire) == 0; };
        while (!await(is_finished)) {
            waiting_.store(true);
            const uint32_t still = unfinished_.load();
            if (still) sleep_while(unfinished_, still);
        }
        waiting_.store(false);
    }

    // Takes and does one index; false where none is left, or none for this thread. What is read of the task after
    // an index was taken is of the same task, which cannot end before that index is done.
    bool take_one(uint32_t thread) {
        uint64_t left = left_.load(std::memory_order_acquire);
        do {
            if (static_cast<uint32_t>(left) == 0 || thread >= left >> 32) return false;
        } while (!left_.compare_exchange_weak(left, left - 1, std::memory_order_acquire));
        task_(work_, count_ - static_cast<uint32_t>(left));
        if (unfinished_.fetch_sub(1) == 1 && waiting_.load()) wake(unfinished_);
        return true;
    }

    bool has_helpers(int wanted) {
        try {
            for (; helpers_ < wanted; ++helpers_) std::thread([this, me = helpers_ + 1u] { help(me); }).detach();
        } catch (const std::system_error&) {  // no more threads are to be had: do with fewer
        }
        return helpers_ > 0;
    }

    [[noreturn]] void help(uint32_t me) {
        for (;;) {
            const uint32_t calls = calls_.load();
            while (take_one(me)) {
            }
            if (await([&] { return calls_.load(std::memory_order_relaxed) != calls; })) continue;
            sleeping_.fetch_add(1);
            sleep_while(calls_, calls);
            sleeping_.fetch_sub(1);
        }
    }

    std::atomic_flag busy_ = ATOMIC_FLAG_INIT;
    Task task_ = nullptr;
    const void* work_ = nullptr;
    int64_t count_ = 0;
    int helpers_ = 0;
    alignas(64) std::atomic<uint64_t> left_{0};  // threads that may take << 32 | indices not yet taken
    alignas(64) std::atomic<uint32_t> unfinished_{0};
    alignas(64) std::atomic<uint32_t> calls_{0}, sleeping_{0};
    std::atomic<bool> waiting_{false};
};

Pool* pool;  // never freed: its threads look at it until the process ends

void start_anew() { pool = new Pool; }  // a forked child has none of its parent's threads

Pool& the_pool() {
    static const bool is_ready = [] {
        start_anew();
        pthread_atfork(nullptr, nullptr, start_anew);
        return true;
    }();
    static_cast<void>(is_ready);
    return *pool;
}

}  // namespace

void share_out(int64_t count, int threads, Task task, const void* work) { the_pool().run(count, threads, task, work); }

}  // namespace baton
