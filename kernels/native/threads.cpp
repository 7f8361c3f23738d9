// Thread pool whose threads share only an atomic count of the remaining indices.
//
// Some threads may be guests on cores that another process owns. They compute at the lowest priority, and only while
// that process says that it does not need the cores. A guest that is computing an index when the owner needs its cores
// again is moved to the cores of this process, since it would hardly advance on the owner's.
#include "threads.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <climits>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

namespace baton {
namespace {

constexpr std::chrono::microseconds AWAKE{40};  // time to spin: longer than that between two products of a layer
constexpr std::chrono::milliseconds LATE{1};    // a guest is late after this time, much longer than an index takes
constexpr std::chrono::milliseconds ALONE{50};  // time without guests after one was late on cores said to be idle
constexpr int LOOKS_PER_CLOCK = 32;
constexpr int MOST_THREADS = 255;
constexpr int64_t MOST_INDICES = int64_t{1} << 32;

void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

void sleep_while(std::atomic<uint32_t>& word, uint32_t value, const timespec* at_most = nullptr) {
    syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, value, at_most, nullptr, 0);
}

void wake(std::atomic<uint32_t>& word) { syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0); }

// Spin until the condition is true or AWAKE has passed; return whether it is true.
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

// Signal that wakes the helper threads that wait for work.
struct alignas(64) Bell {
    std::atomic<uint32_t> calls{0}, sleeping{0};

    void ring() {
        calls.fetch_add(1);
        if (sleeping.load() > 0) wake(calls);
    }
    void wait(uint32_t heard) {
        if (await([&] { return calls.load(std::memory_order_relaxed) != heard; })) return;
        sleeping.fetch_add(1);
        sleep_while(calls, heard);
        sleeping.fetch_sub(1);
    }
};

// Guests: threads on cores that another process owns. They have numbers from `own` on.
struct Guests {
    std::atomic<const uint8_t*> in_use{nullptr};  // not 0 while the owner uses the cores; null: no guests
    int own = MOST_THREADS;
    cpu_set_t cores, home;
    std::mutex moving;
    std::vector<pid_t> threads;
    bool are_home = false;
    std::chrono::steady_clock::time_point alone_until{};

    bool are_welcome() const {
        const uint8_t* flag = in_use.load(std::memory_order_acquire);
        return flag && !*static_cast<const volatile uint8_t*>(flag);
    }
    void enter() {
        // Move before the priority is lowered: then a thread would get no time to move while its first core is busy.
        {
            const std::lock_guard<std::mutex> lock(moving);
            sched_setaffinity(0, sizeof cores, are_home ? &home : &cores);
            threads.push_back(static_cast<pid_t>(syscall(SYS_gettid)));
        }
        const sched_param none{};
        sched_setscheduler(0, SCHED_IDLE, &none);
    }
    void move(bool to_home) {
        const std::lock_guard<std::mutex> lock(moving);
        are_home = to_home;
        for (const pid_t thread : threads) sched_setaffinity(thread, sizeof cores, to_home ? &home : &cores);
    }
};

class Pool {
   public:
    void run(int64_t count, int threads, Task task, const void* work) {
        threads = std::min(threads, MOST_THREADS);
        if (count >= MOST_INDICES || busy_.test_and_set(std::memory_order_acquire)) return do_alone(count, task, work);
        if (threads > guests_.own && !invites()) threads = guests_.own;
        if (threads > 1 && has_helpers(threads - 1)) {
            do_together(count, threads, task, work);
        } else {
            do_alone(count, task, work);
        }
        busy_.clear(std::memory_order_release);
    }

    void borrow(const uint8_t* in_use, int own, const int32_t* cores, int count) {
        while (busy_.test_and_set(std::memory_order_acquire)) std::this_thread::yield();
        CPU_ZERO(&guests_.cores);
        for (int i = 0; i < count; ++i) CPU_SET(cores[i], &guests_.cores);
        sched_getaffinity(0, sizeof guests_.home, &guests_.home);
        guests_.own = in_use ? own : MOST_THREADS;
        guests_.in_use.store(in_use, std::memory_order_release);
        guests_.move(false);
        busy_.clear(std::memory_order_release);
    }

   private:
    static void do_alone(int64_t count, Task task, const void* work) {
        for (int64_t index = 0; index < count; ++index) task(work, index);
    }

    bool invites() {
        if (!guests_.are_welcome() || std::chrono::steady_clock::now() < guests_.alone_until) return false;
        if (guests_.are_home) guests_.move(false);
        return true;
    }

    void do_together(int64_t count, int threads, Task task, const void* work) {
        task_ = task, work_ = work, count_ = count;
        unfinished_.store(static_cast<uint32_t>(count), std::memory_order_relaxed);
        left_.store(static_cast<uint64_t>(threads) << 32 | static_cast<uint64_t>(count));
        const bool has_guests = threads > guests_.own;
        if (has_guests) guests_bell_.ring();
        bell_.ring();
        while (take_one(0)) {
        }
        const auto is_finished = [this] { return unfinished_.load(std::memory_order_acquire) == 0; };
        const timespec late{0, std::chrono::nanoseconds(LATE).count()};
        while (!await(is_finished)) {
            waiting_.store(true);
            const uint32_t still = unfinished_.load();
            if (still) sleep_while(unfinished_, still, has_guests ? &late : nullptr);
            if (has_guests && !guests_.are_home && unfinished_.load() == still) bring_guests_home();
        }
        waiting_.store(false);
    }

    void bring_guests_home() {
        guests_.move(true);
        // If the owner says that it needs the cores, guests may return when it does not. Otherwise others use the cores.
        if (guests_.are_welcome()) guests_.alone_until = std::chrono::steady_clock::now() + ALONE;
    }

    // Compute one index; return false if none is left, or if this thread may not take one. After an index is taken, the
    // fields of the task are still those of the same task, which cannot finish before this index.
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
        } catch (const std::system_error&) {  // the system allows no more threads: continue with fewer
        }
        return helpers_ > 0;
    }

    [[noreturn]] void help(uint32_t me) {
        const bool is_guest = me >= static_cast<uint32_t>(guests_.own);
        if (is_guest) guests_.enter();
        Bell& bell = is_guest ? guests_bell_ : bell_;
        for (;;) {
            const uint32_t heard = bell.calls.load();
            while ((!is_guest || guests_.are_welcome()) && take_one(me)) {
            }
            bell.wait(heard);
        }
    }

    std::atomic_flag busy_ = ATOMIC_FLAG_INIT;
    Task task_ = nullptr;
    const void* work_ = nullptr;
    int64_t count_ = 0;
    int helpers_ = 0;
    // Number of threads that may take an index, in the upper half; number of remaining indices, in the lower half.
    alignas(64) std::atomic<uint64_t> left_{0};
    alignas(64) std::atomic<uint32_t> unfinished_{0};
    std::atomic<bool> waiting_{false};
    Bell bell_, guests_bell_;
    Guests guests_;
};

Pool* pool;  // never freed, since its threads use it until the process exits

void start_anew() { pool = new Pool; }  // also called in a forked child, which has none of its parent's threads

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

extern "C" void baton_borrow(const uint8_t* in_use, int32_t own, const int32_t* cores, int32_t count) {
    baton::the_pool().borrow(in_use, own, cores, count);
}
