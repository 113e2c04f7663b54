// Memory for packed weights: matrices smaller than a few huge pages share chunks of them.
#pragma once

#include <cstddef>
#include <memory>

namespace magicpig {

// Aligned to 64 bytes; contents undefined. A chunk goes back when the last piece of it does.
std::shared_ptr<char> allocate_weights(size_t bytes);

}  // namespace magicpig
