// The Python border of linear layers, gated MLPs and norms.
#pragma once

#include <nanobind/nanobind.h>

namespace magicpig {

void bind_linear(nanobind::module_& m);

}  // namespace magicpig
