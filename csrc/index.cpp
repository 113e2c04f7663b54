#include "index.h"

#include <algorithm>
#include <vector>

#include "lsh.h"
#include "threads.h"

namespace magicpig {

namespace {
constexpr size_t kSumChunk = 1024;  // rows summed in float32 before the sum goes on in double
}

void mean_of(const Kernels& kernels, RowType type, const char* rows, size_t count, uint32_t dim, uint32_t size,
             float* mean) {
  const size_t parts = (count + kSumChunk - 1) / kSumChunk, row_bytes = size_t{2} * dim * element_bytes(type);
  std::vector<float> sums(parts * size);
  parallel_for(parts, [&](size_t part) {
    const size_t first = part * kSumChunk;
    kernels.add_rows[type](rows + first * row_bytes, std::min(kSumChunk, count - first), dim, size,
                           sums.data() + part * size);
  });
  for (uint32_t d = 0; d < size; ++d) {
    double total = 0;
    for (size_t part = 0; part < parts; ++part) total += sums[part * size + d];
    mean[d] = static_cast<float>(total / static_cast<double>(count));
  }
}

}  // namespace magicpig
