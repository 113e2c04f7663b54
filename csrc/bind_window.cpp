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

namespace magicpig {

using namespace nb::literals;

namespace {

using Output = nb::ndarray<nb::pytorch, nb::ndim<3>, nb::c_contig, nb::device::cpu>;

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

BatchView batch_view(const Array& array, size_t batch, const Geometry& geometry, const char* name) {
  if (array.ndim() != 3 || array.shape(0) != batch || array.shape(1) != geometry.num_kv_heads ||
      array.shape(2) != geometry.head_dim) {
    refuse(std::string(name) + " must have shape [batch, num_kv_heads, head_dim]");
  }
  if (array.stride(2) != 1 || array.stride(0) < 0 || array.stride(1) < 0)
    refuse(std::string(name) + " must be contiguous in its last dimension");
  return {static_cast<const char*>(array.data()), type_of(array, name), static_cast<size_t>(array.stride(0)),
          static_cast<size_t>(array.stride(1))};
}

std::tuple<double, double, double> step_batch(const std::vector<Window*>& windows,
                                              const std::vector<const LayerKV*>& fars, const Array& queries,
                                              const Array& keys, const Array& values, float scale, float softcap,
                                              size_t span, const Output& out) {
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
  StepArgs args = {query_data(queries, size, geometry),
                   type_of(queries, "queries"),
                   batch_view(keys, size, geometry, "keys"),
                   batch_view(values, size, geometry, "values"),
                   {scale, softcap},
                   span,
                   static_cast<char*>(out.data())};
  if (out.shape(0) != size || out.shape(1) != geometry.num_heads || out.shape(2) != geometry.head_dim ||
      type_of(out, "out") != args.type)
    refuse("out must have the shape and dtype of queries");
  nb::gil_scoped_release release;
  const Timing timing = step(batch, args);
  return {timing.draw, timing.drawn, timing.exact};
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
      .def_prop_ro(
          "reads", [](const Window& window) { return std::make_pair(window.reads.rows, window.reads.tokens); },
          "Rows that steps read, over all query heads, and the tokens there were to read.");
  m.def(
      "step", &step_batch, "windows"_a, "fars"_a, "queries"_a.noconvert(), "keys"_a.noconvert(), "values"_a.noconvert(),
      "scale"_a, "softcap"_a, "span"_a, "out"_a.noconvert(),
      "Appends a token to each window and attends to it all; returns the thread-seconds of drawing, of attention over "
      "drawn rows and over rows read whole.");
}

}  // namespace magicpig
