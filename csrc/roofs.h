// What the machine's memory can do: the roofs that benchmarks compare with.
#pragma once

#include <cstddef>

namespace magicpig {

// Bytes per second of reading a buffer of `bytes` from end to end on all threads, best of `repeats`.
double stream_read_roof(size_t bytes, int repeats);

// Bytes per second of reading `row_bytes`-long rows at random places of such a buffer, prefetched, best of `repeats`.
double gather_read_roof(size_t bytes, size_t row_bytes, int repeats);

}  // namespace magicpig
