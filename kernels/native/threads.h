// Work shared between threads that wait briefly awake and then asleep: a core that another program holds up slows a
// step down by what it takes away, and by no more. One pool per process, started when first asked for more than one.
#pragma once

#include <cstdint>
#include <type_traits>

namespace baton {

using Task = void (*)(const void* work, int64_t index);

// Calls task(work, index) once for every index of [0, count), on this thread and on `threads` - 1 others at most, and
// returns when all are done. While another thread of the process shares out work, this one does its own alone.
void share_out(int64_t count, int threads, Task task, const void* work);

template <class Work>
inline void share(int64_t count, int threads, const Work& work) {
    if (threads <= 1 || count <= 1) {
        for (int64_t index = 0; index < count; ++index) work(index);
        return;
    }
    share_out(count, threads, [](const void* self, int64_t index) { (*static_cast<const Work*>(self))(index); }, &work);
}

// The same for rows too small to be handed out one by one.
template <class Work>
inline void share_rows(int64_t rows, int threads, const Work& work) {
    const int64_t parts = threads <= 1 ? 1 : rows < 4 * threads ? rows : 4 * threads;
    share(parts, threads, [&](int64_t part) {
        for (int64_t row = rows * part / parts; row < rows * (part + 1) / parts; ++row) work(row);
    });
}

}  // namespace baton
