// Memory that is kept between calls, since the system allocates fresh memory slowly, page by page.
#pragma once

#include <cstdint>
#include <vector>

namespace baton {

// Return memory for at least `size` numbers, of arbitrary values. Invalidates earlier pointers into the same vector.
template <class Number>
Number* reserved(std::vector<Number>& room, int64_t size) {
    if (static_cast<int64_t>(room.size()) < size) room.resize(size);
    return room.data();
}

}  // namespace baton
