// Memory kept from call to call, since the system hands out fresh memory page by page, which takes long.
#pragma once

#include <cstdint>
#include <vector>

namespace baton {

// At least `size` numbers, of any value; earlier ones of the same room are void.
template <class Number>
Number* reserved(std::vector<Number>& room, int64_t size) {
    if (static_cast<int64_t>(room.size()) < size) room.resize(size);
    return room.data();
}

}  // namespace baton
