// The Python border of windows and decode steps.
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <limits>

#include "bind.h"
#include "step.h"
#include "tensor_ref.h"

namespace magicpig {

using namespace nb::literals;

namespace {

bool append(Window& window, const Array& keys, const Array& values) {
  const TensorView key_view = view(keys, window.geometry(), "keys"),
                   value_view = view(values, window.geometry(), "values");
  if (values.shape(1) != keys.shape(1)) refuse("values must have as many tokens as keys");
  nb::gil_scoped_release release;
  return window.append(key_view, value_view, keys.shape(1));
}

void read(const Window& window, size_t first, const Rows& keys, const Rows& values) {
  read_checked(window.geometry(), {window.newest(window.num_tokens())}, first, keys, values);
}

bool shaped(const TensorRef& tensor, size_t batch, size_t heads, size_t dim) {
  return tensor.ndim() == 3 && tensor.shape(0) == batch && tensor.shape(1) == heads && tensor.shape(2) == dim;
}

BatchView batch_view(const TensorRef& tensor, size_t batch, const Geometry& geometry, const char* name) {
  if (!shaped(tensor, batch, geometry.num_kv_heads, geometry.head_dim))
    refuse(std::string(name) + " must have shape [batch, num_kv_heads, head_dim]");
  if (tensor.stride(2) != 1 || tensor.stride(0) < 0 || tensor.stride(1) < 0)
    refuse(std::string(name) + " must be contiguous in its last dimension");
  return {tensor.bytes(name), tensor.row_type(name), static_cast<size_t>(tensor.stride(0)),
          static_cast<size_t>(tensor.stride(1))};
}

void step_batch(const std::vector<Window*>& windows, const std::vector<const LayerKV*>& fars, const TensorRef& queries,
                const TensorRef& keys, const TensorRef& values, float scale, float softcap, size_t span,
                const TensorRef& out) {
  if (windows.empty() || std::count(windows.begin(), windows.end(), nullptr)) refuse("windows must hold windows");
  if (!fars.empty() && fars.size() != windows.size()) refuse("fars must be empty or one for each window");
  if (!(scale > 0 && scale <= kMaxScale)) refuse("scale must be above 0 and at most 100");
  if (!(softcap >= 0 && softcap <= 1e6f)) refuse("softcap must be from 0 to 1e6");
  if (span < 1) refuse("span must be at least 1");
  const Geometry& geometry = windows[0]->geometry();
  const size_t size = windows.size();
  std::vector<Window*> sorted = windows;
  std::sort(sorted.begin(), sorted.end());
  if (std::adjacent_find(sorted.begin(), sorted.end()) != sorted.end()) refuse("windows must differ from each other");
  std::vector<StepSequence> batch;
  for (size_t i = 0; i < size; ++i) {
    const LayerKV* far = fars.empty() ? nullptr : fars[i];
    if (!same(geometry, windows[i]->geometry()) || (far && !same(geometry, far->geometry())))
      refuse("windows and fars must agree in heads, head_dim, dtype and index");
    batch.push_back({windows[i], far});
  }
  if (!shaped(queries, size, geometry.num_heads, geometry.head_dim) || !queries.dense())
    refuse("queries must have shape [batch, num_heads, head_dim] and be contiguous");
  StepArgs args = {queries.bytes("queries"),
                   queries.row_type("queries"),
                   batch_view(keys, size, geometry, "keys"),
                   batch_view(values, size, geometry, "values"),
                   {scale, softcap},
                   span,
                   out.bytes("out")};
  if (!shaped(out, size, geometry.num_heads, geometry.head_dim) || !out.dense() || out.row_type("out") != args.type)
    refuse("out must have the shape and dtype of queries and be contiguous");
  nb::gil_scoped_release release;
  step(batch, args);
}

}  // namespace

void bind_window(nb::module_& m) {
  nb::class_<Window>(m, "Window")
      .def(
          "__init__", [](Window* self, const LayerKV& like) { new (self) Window(like.geometry()); }, "like"_a,
          "A window for the heads, head_dim, dtype and index of a LayerKV.")
      .def("append", &append, "keys"_a.noconvert(), "values"_a.noconvert(),
           "Adds tokens [num_kv_heads, tokens, head_dim]; says whether all are finite and in range.")
      .def("drop", &Window::drop, "first"_a, "count"_a)
      .def("read", &read, "first"_a, "keys"_a.noconvert(), "values"_a.noconvert(),
           "Copies tokens from `first` on to keys and values [num_kv_heads, tokens, head_dim].")
      .def("fork", &Window::fork)
      .def_prop_ro("num_tokens", &Window::num_tokens)
      .def_prop_ro("nbytes", &Window::nbytes)
      .def_prop_ro("spoiled", &Window::spoiled, "Whether it has held numbers that are not finite or out of range.")
      .def_prop_ro(
          "reads", [](const Window& window) { return std::make_pair(window.reads.rows, window.reads.tokens); },
          "Rows that steps read, over all query heads, and the tokens there were to read.")
      .def_prop_ro(
          "far_reads",
          [](const Window& window) {
            const Reads& reads = window.reads;
            return std::make_tuple(reads.steps, reads.far_rows, reads.far_tokens, reads.visited);
          },
          "Steps, rows of the far context that they read over all query heads, those there were, and entries of hash "
          "buckets that were walked through.")
      .def_prop_ro(
          "seconds",
          [](const Window& window) {
            const Timing& spent = window.spent;
            return std::make_tuple(spent.draw, spent.drawn, spent.exact);
          },
          "Thread-seconds of steps in which this window was the first: drawing rows, attention over drawn rows, and "
          "over rows read whole.");
  m.def("step", &step_batch, "windows"_a, "fars"_a, "queries"_a.noconvert(), "keys"_a.noconvert(),
        "values"_a.noconvert(), "scale"_a, "softcap"_a, "span"_a, "out"_a.noconvert(),
        "Appends a token to each window and attends to it all.");
}

}  // namespace magicpig
