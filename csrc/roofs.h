// What the machine's memory can do: the roofs that benchmarks compare with.
#pragma once

#include <cstddef>

namespace magicpig {

// Bytes per second of reading a buffer of `bytes` from end to end on all threads: the median of `repeats`
// passes, with or without software prefetching, whichever is better.
double stream_read_roof(size_t bytes, int repeats);

// Bytes per second of reading `row_bytes`-long rows at random places of such a buffer: the median of `repeats` passes,
// with the prefetch distance that is best.
double gather_read_roof(size_t bytes, size_t row_bytes, int repeats);

}  // namespace magicpig
