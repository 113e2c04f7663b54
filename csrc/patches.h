// Which of the codes a pass is over, where it is not all of them.
#pragma once

#include <vector>

#include "codes.h"

namespace magicpig {

// Draws patches of a sequence's segments for the heads of one KV head together, each by itself: by the weight that its
// keys would have at their mean, and a quarter of them by chance alone, so that none is impossible.
// share: of all patches, as expected. The tokens of `ask` do not matter.
Passed draw_patches(const Kernels& kernels, const std::vector<const Codes*>& segments, const Ask& ask, double share);

}  // namespace magicpig
