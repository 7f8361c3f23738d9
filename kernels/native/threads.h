// Work shared by threads that spin briefly while they wait and then sleep: another program on a core slows a step down
// only by the time that it takes. One pool per process, started with the first work for several threads.
#pragma once

#include <cstdint>
#include <type_traits>

namespace baton {

using Task = void (*)(const void* work, int64_t index);

// Call task(work, index) once for every index of [0, count), on this thread and at most `threads` - 1 others, and return
// when all are done. While another thread of the process uses the pool, this one computes alone.
void share_out(int64_t count, int threads, Task task, const void* work);

template <class Work>
inline void share(int64_t count, int threads, const Work& work) {
    if (threads <= 1 || count <= 1) {
        for (int64_t index = 0; index < count; ++index) work(index);
        return;
    }
    share_out(count, threads, [](const void* self, int64_t index) { (*static_cast<const Work*>(self))(index); }, &work);
}

// Call work(row) for every row, in runs of rows, since single ones are too small to share.
template <class Work>
inline void share_rows(int64_t rows, int threads, const Work& work) {
    const int64_t parts = threads <= 1 ? 1 : rows < 4 * threads ? rows : 4 * threads;
    share(parts, threads, [&](int64_t part) {
        for (int64_t row = rows * part / parts; row < rows * (part + 1) / parts; ++row) work(row);
    });
}

}  // namespace baton
