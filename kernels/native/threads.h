// Work that is shared by a pool of threads. Waiting threads spin briefly and then sleep, so that another program on a
// core slows a step down only by the time that it takes. A process has one pool, which the first shared work starts.
#pragma once

#include <cstdint>
#include <type_traits>

namespace baton {

using Task = void (*)(const void* work, int64_t index);

// Call task(work, index) once for every index of [0, count), on this thread and at most `threads` - 1 others; return
// when all calls have finished. If another thread of the process uses the pool, this thread computes alone.
void share_out(int64_t count, int threads, Task task, const void* work);

template <class Work>
inline void share(int64_t count, int threads, const Work& work) {
    if (threads <= 1 || count <= 1) {
        for (int64_t index = 0; index < count; ++index) work(index);
        return;
    }
    share_out(count, threads, [](const void* self, int64_t index) { (*static_cast<const Work*>(self))(index); }, &work);
}

// Call work(row) for every row. Threads take several rows at a time, since single rows are too little work to share.
template <class Work>
inline void share_rows(int64_t rows, int threads, const Work& work) {
    const int64_t parts = threads <= 1 ? 1 : rows < 4 * threads ? rows : 4 * threads;
    share(parts, threads, [&](int64_t part) {
        for (int64_t row = rows * part / parts; row < rows * (part + 1) / parts; ++row) work(row);
    });
}

}  // namespace baton
