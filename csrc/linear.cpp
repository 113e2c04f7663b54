#include "linear.h"

#include <stdexcept>
#include <string>

#include "dispatch.h"

namespace magicpig {

void PackedLinear::forward(const bf16* x, size_t rows, bf16* y) const {
  const Kernels& kernel = kernels();
  for (size_t begin = 0; begin < rows; begin += kMaxInputRows) {
    const size_t count = std::min(kMaxInputRows, rows - begin);
    multiply(kernel, panels_, prepare_inputs(kernel, x + begin * in(), count, in()), count, y + begin * out());
  }
}

void PackedLinear::lookup(const int64_t* ids, size_t count, bf16* rows) const {
  constexpr size_t kPerTask = 16;
  for (size_t i = 0; i < count; ++i) {
    if (ids[i] < 0 || static_cast<uint64_t>(ids[i]) >= out()) {
      throw std::invalid_argument("ids must be from 0 to " + std::to_string(out() - 1) + ", not " +
                                  std::to_string(ids[i]));
    }
  }
  parallel_for((count + kPerTask - 1) / kPerTask, [&](size_t task) {
    for (size_t i = task * kPerTask; i < std::min(count, (task + 1) * kPerTask); ++i)
      panels_.unpack(static_cast<size_t>(ids[i]), rows + i * in());
  });
}

}  // namespace magicpig
