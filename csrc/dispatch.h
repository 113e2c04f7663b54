// Which instruction set's kernels run.
#pragma once

#include <string>
#include <vector>

#include "kernels.h"

namespace magicpig {

// The chosen kernels. First use picks the best set this machine supports, or the one named by MAGICPIG_ISA.
const Kernels& kernels();

std::vector<std::string> supported_isas();  // from the plainest to the best
void set_isa(const std::string& name);      // std::invalid_argument for a name that is unknown or not supported here

}  // namespace magicpig
