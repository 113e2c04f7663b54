// The Python border: arguments in, C++ objects out. It checks what memory safety needs; magicpig.kv gives friendlier
// messages.
#include "bind.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <mutex>

#include "bind_linear.h"
#include "dispatch.h"
#include "growing.h"
#include "layer_kv.h"
#include "roofs.h"
#include "tables.h"
#include "threads.h"

namespace magicpig {

using namespace nb::literals;

namespace {

using Codes = nb::ndarray<nb::pytorch, int32_t, nb::ndim<2>>;

void append(LayerKV& kv, const Array& keys, const Array& values) {
  const TensorView key_view = view(keys, kv.geometry(), "keys"), value_view = view(values, kv.geometry(), "values");
  const size_t count = keys.shape(1);
  if (values.shape(1) != count) refuse("values must have as many tokens as keys");
  nb::gil_scoped_release release;
  kv.append(key_view, value_view, count);
}

using Signs = std::tuple<In<float, 2>, In<float, 2>, In<uint16_t, 3>>;
using Sorted = std::tuple<In<float, 2>, In<float, 2>, In<uint32_t, 3>, In<uint16_t, 3>>;
using Found = std::variant<Signs, Sorted>;

template <class T>
void require_shape(const In<T, 3>& array, size_t heads, size_t rows, size_t columns, const char* message) {
  if (array.shape(0) != heads || array.shape(1) != rows || array.shape(2) != columns) refuse(message);
}

Hashed hashed_keys(const Geometry& geometry, const Found& found, size_t count) {
  if (!geometry.lsh || count < 1 || count > Segment::kMaxTokens)
    refuse("a segment of hash tables has from 1 to 65,536 tokens");
  const Lsh& lsh = *geometry.lsh;
  const size_t heads = geometry.num_kv_heads;
  return std::visit(
      [&](const auto& arrays) -> Hashed {
        const auto &means = std::get<0>(arrays), &inv_norms = std::get<1>(arrays);
        if (means.shape(0) != heads || means.shape(1) != geometry.head_dim)
          refuse("means must have shape [num_kv_heads, head_dim]");
        if (inv_norms.shape(0) != heads || inv_norms.shape(1) != count)
          refuse("inv_norms must have shape [num_kv_heads, tokens]");
        if constexpr (std::is_same_v<std::decay_t<decltype(arrays)>, Signs>) {
          const auto& signs = std::get<2>(arrays);
          require_shape(signs, heads, lsh.num_groups, count,
                        "signs must have shape [num_kv_heads, projections / 16, tokens]");
          return {means.data(), inv_norms.data(), signs.data()};
        } else {
          const auto &offsets = std::get<2>(arrays), &ids = std::get<3>(arrays);
          require_shape(offsets, heads, lsh.num_tables, lsh.num_buckets() + 1,
                        "offsets must have shape [num_kv_heads, num_tables, buckets + 1]");
          require_shape(ids, heads, lsh.num_tables, count, "ids must have shape [num_kv_heads, num_tables, tokens]");
          return {means.data(), inv_norms.data(), nullptr, offsets.data(), ids.data()};
        }
      },
      found);
}

// One segment.
void append_hashed(LayerKV& kv, const Array& keys, const Array& values, const Found& found) {
  const Geometry& geometry = kv.geometry();
  const TensorView key_view = view(keys, geometry, "keys"), value_view = view(values, geometry, "values");
  const size_t count = keys.shape(1);
  if (values.shape(1) != count) refuse("values must have as many tokens as keys");
  const Hashed hashed = hashed_keys(geometry, found, count);
  nb::gil_scoped_release release;
  const auto segment =
      std::make_shared<Segment>(geometry, Source{{}, key_view, value_view}, 0, static_cast<uint32_t>(count));
  segment->build_index(geometry, &hashed);
  kv.adopt(segment);
}

// A GrowingSegment, and the sequence that will have it.
struct Growing {
  Growing(LayerKV& kv_, uint32_t num_tokens) : kv(kv_), segment(kv_.geometry(), num_tokens) {}
  LayerKV& kv;
  GrowingSegment segment;
  std::mutex mutex;  // over the segment: one thread at a time
};

void add_part(Growing& growing, const Array& keys, const Array& values) {
  const Geometry& geometry = growing.segment.geometry();
  const TensorView key_view = view(keys, geometry, "keys"), value_view = view(values, geometry, "values");
  const size_t count = keys.shape(1);
  if (values.shape(1) != count) refuse("values must have as many tokens as keys");
  nb::gil_scoped_release release;
  const std::lock_guard lock(growing.mutex);
  growing.segment.add(key_view, value_view, count);
}

void finish_growing(Growing& growing, const std::optional<Found>& found) {
  std::optional<Hashed> hashed;
  if (found) hashed = hashed_keys(growing.segment.geometry(), *found, growing.segment.num_tokens());
  nb::gil_scoped_release release;
  const std::lock_guard lock(growing.mutex);
  growing.kv.adopt(growing.segment.finish(hashed ? &*hashed : nullptr));
}

using Bytes = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using ByteView = nb::ndarray<nb::numpy, const uint8_t, nb::ndim<1>>;

Buffer borrowed(const Bytes& bytes, const char* name) {
  if (bytes.size() == 0) return {};
  if (reinterpret_cast<uintptr_t>(bytes.data()) % 64) refuse(std::string(name) + " must be aligned to 64 bytes");
  return Buffer(reinterpret_cast<const char*>(bytes.data()), bytes.size(), std::make_shared<Bytes>(bytes));
}

void adopt(LayerKV& kv, uint32_t num_tokens, const Bytes& rows, const Bytes& tables) {
  Buffer row_memory = borrowed(rows, "rows"), table_memory = borrowed(tables, "tables");
  nb::gil_scoped_release release;
  kv.adopt(std::make_shared<Segment>(kv.geometry(), num_tokens, std::move(row_memory), std::move(table_memory)));
}

nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>> empty_bytes(size_t bytes) {
  auto* held = new Buffer(bytes);
  nb::capsule owner(held, [](void* p) noexcept { delete static_cast<Buffer*>(p); });
  return {reinterpret_cast<uint8_t*>(held->data()), {bytes}, owner};
}

std::pair<ByteView, ByteView> segment_memory(const LayerKV& kv, size_t i) {
  const auto segments = kv.segments();
  if (i >= segments->size()) refuse("no such segment");
  using Held = std::shared_ptr<const Segment>;
  auto* held = new Held((*segments)[i]);
  nb::capsule owner(held, [](void* p) noexcept { delete static_cast<Held*>(p); });
  const auto view = [&](const Buffer& buffer) {
    return ByteView(reinterpret_cast<const uint8_t*>(buffer.data()), {buffer.size()}, owner);
  };
  const Index* index = (*held)->index();
  return {view((*held)->row_memory()), index ? view(index->memory()) : ByteView(nullptr, {0}, owner)};
}

void read(const LayerKV& kv, size_t first, const Rows& keys, const Rows& values) {
  const auto segments = kv.segments();
  read_checked(kv.geometry(), runs_of(*segments), first, keys, values);
}

Codes codes(const Lsh& lsh, const In<float, 2>& x) {
  const size_t count = x.shape(0);
  if (x.shape(1) != lsh.head_dim) refuse("x must have shape [n, head_dim]");
  std::vector<float> padded(count * lsh.dim);
  for (size_t i = 0; i < count; ++i) {
    std::copy_n(x.data() + i * lsh.head_dim, lsh.head_dim, padded.data() + i * lsh.dim);
  }
  const std::vector<uint16_t> bits = lsh.sign_bits(kernels(), padded.data(), count);
  std::vector<int32_t> out;
  for (size_t i = 0; i < count; ++i)
    for (uint32_t t = 0; t < lsh.num_tables; ++t) out.push_back(lsh.code(bits.data(), count, i, t));
  return owned<2>(std::move(out), {count, lsh.num_tables});
}

Codes segment_codes(const LayerKV& kv, size_t segment, uint32_t kv_head) {
  const auto segments = kv.segments();
  if (segment >= segments->size() || kv_head >= kv.geometry().num_kv_heads) refuse("no such segment or kv_head");
  const auto* index = dynamic_cast<const Tables*>((*segments)[segment]->index());
  if (index == nullptr) refuse("the segment has no hash tables");
  return owned<2>(index->codes(kv_head), {(*segments)[segment]->num_tokens(), kv.geometry().lsh->num_tables});
}

void exp_of(const In<float, 1>& x, const Out<float, 1>& out) {
  if (x.shape(0) % kChunk != 0 || x.shape(0) != out.shape(0))
    refuse("x and out must have the same multiple of 16 elements");
  kernels().exp(x.data(), x.shape(0), out.data());
}

}  // namespace

NB_MODULE(_native, m) {
  nb::set_leak_warnings(false);  // configurations stay cached until the interpreter is gone
  m.doc() = "Native core of magicpig. Use it through the magicpig package.";

  nb::class_<Lsh>(m, "Lsh")
      .def(
          "__init__",
          [](Lsh* self, uint32_t bits_per_table, uint32_t num_tables, uint32_t min_collisions,
             const In<float, 2>& projection) {
            if (projection.shape(1) != size_t{bits_per_table} * num_tables)
              refuse("projection must have num_tables * bits_per_table columns");
            new (self) Lsh(bits_per_table, num_tables, min_collisions, static_cast<uint32_t>(projection.shape(0)),
                           projection.data());
          },
          "bits_per_table"_a, "num_tables"_a, "min_collisions"_a, "projection"_a.noconvert())
      .def("codes", &codes, "x"_a.noconvert(), "Buckets [n, num_tables] of vectors x [n, head_dim].");

  nb::class_<Scan>(m, "Scan").def(
      "__init__",
      [](Scan* self, uint32_t bits_per_dim, float budget, uint32_t min_rows, float target_error, uint32_t seed,
         uint32_t head_dim, const In<float, 2>& signs) {
        if (signs.shape(0) > kMaxRounds || signs.shape(1) != padded_dim(head_dim))
          refuse("signs must have a column for each dimension, padded, and few rows");
        new (self) Scan(bits_per_dim, budget, min_rows, target_error, seed, head_dim, signs.data(),
                        static_cast<uint32_t>(signs.shape(0)));
      },
      "bits_per_dim"_a, "budget"_a, "min_rows"_a, "target_error"_a, "seed"_a, "head_dim"_a, "signs"_a.noconvert());

  nb::class_<LayerKV>(m, "LayerKV")
      .def(
          "__init__",
          [](LayerKV* self, uint32_t num_heads, uint32_t num_kv_heads, uint32_t head_dim, const std::string& dtype,
             std::shared_ptr<Lsh> lsh, std::shared_ptr<Scan> scan, uint32_t exact_below) {
            new (self) LayerKV(Geometry{num_heads, num_kv_heads, head_dim, type_named(dtype), std::move(lsh),
                                        std::move(scan), exact_below});
          },
          "num_heads"_a, "num_kv_heads"_a, "head_dim"_a, "dtype"_a, "lsh"_a.none(), "scan"_a.none(), "exact_below"_a)
      .def("append", &append, "keys"_a.noconvert(), "values"_a.noconvert())
      .def("fork", &LayerKV::fork)
      .def("append_hashed", &append_hashed, "keys"_a.noconvert(), "values"_a.noconvert(), "found"_a.noconvert(),
           "Adds a segment whose keys were hashed elsewhere. found: means of the keys [num_kv_heads, head_dim]; of "
           "keys less those, one over their norms, or 0, [num_kv_heads, tokens]; and either signs of their projections "
           "[num_kv_heads, projections / 16, tokens], sixteen to a number, or the tables that they are sorted into: "
           "where buckets begin [num_kv_heads, num_tables, buckets + 1], and rows [num_kv_heads, num_tables, tokens].")
      .def("read", &read, "first"_a, "keys"_a.noconvert(), "values"_a.noconvert(),
           "Copies tokens from `first` on to keys and values [num_kv_heads, tokens, head_dim].")
      .def("adopt", &adopt, "num_tokens"_a, "rows"_a.noconvert(), "tables"_a.noconvert(),
           "Adds a segment from memory that segment_memory gave, or a copy of it; the arrays are held, not copied.")
      .def("segment_memory", &segment_memory, "segment"_a,
           "Views of a segment's rows and tables; the tables are empty where there is no index.")
      .def_prop_ro("num_tokens", [](const LayerKV& kv) { return num_tokens(*kv.segments()); })
      .def_prop_ro("segment_sizes",
                   [](const LayerKV& kv) {
                     std::vector<uint32_t> sizes;
                     for (const auto& segment : *kv.segments()) sizes.push_back(segment->num_tokens());
                     return sizes;
                   })
      .def_prop_ro(
          "build_seconds",
          [](const LayerKV& kv) {
            double rows = 0, hash = 0, sort = 0;
            for (const auto& segment : *kv.segments()) {
              rows += segment->row_seconds();
              if (segment->index()) hash += segment->index()->code_seconds();
              if (segment->index()) sort += segment->index()->sort_seconds();
            }
            return std::make_tuple(rows, hash, sort);
          },
          "Seconds it took to copy the rows, code the keys and sort the codes, over the segments there are.")
      .def("segment_codes", &segment_codes, "segment"_a, "kv_head"_a,
           "Buckets [tokens, num_tables] of a segment's keys, read back from its tables; for tests.")
      .def_prop_ro(
          "nbytes",
          [](const LayerKV& kv) {
            size_t rows = 0, index = 0;
            for (const auto& segment : *kv.segments()) {
              rows += segment->row_nbytes();
              index += segment->index_nbytes();
            }
            return std::make_pair(rows, index);
          },
          "Bytes of rows and of the index.");

  nb::class_<Growing>(m, "GrowingSegment", "Of a sequence, for tokens that come in parts.")
      .def(nb::init<LayerKV&, uint32_t>(), nb::keep_alive<1, 2>(), "kv"_a, "num_tokens"_a)
      .def("add", &add_part, "keys"_a.noconvert(), "values"_a.noconvert(), "The next tokens.")
      .def("finish", &finish_growing, "found"_a.noconvert() = nb::none(),
           "Adds the segment to kv, when all tokens are there. found: as in LayerKV.append_hashed; None: found here, "
           "where it is needed.");

  m.def("empty_bytes", &empty_bytes, "bytes"_a, "Memory for a segment that is made elsewhere; contents undefined.");
  m.def("available_memory", &available_memory, "Bytes that can still be had.");
  m.def("isa", [] { return std::string(kernels().name); });
  m.def("supported_isas", &supported_isas);
  m.def("set_isa", &set_isa, "name"_a);
  m.def("num_threads", &num_threads);
  m.def("set_num_threads", &set_num_threads, "count"_a);
  m.def("rest_threads", &rest_threads, "count"_a,
        "So many of the pool's threads leave their cores to others, until it is called again.");
  m.def("exp", &exp_of, "x"_a.noconvert(), "out"_a.noconvert(), "The kernels' exponential, for tests.");
  m.def("log_inclusion_probability", &log_inclusion_probability, "angle_over_pi"_a, "bits_per_table"_a, "num_tables"_a,
        "min_collisions"_a);
  m.def("stream_read_roof", &stream_read_roof, "bytes"_a, "repeats"_a, nb::call_guard<nb::gil_scoped_release>());
  m.def("gather_read_roof", &gather_read_roof, "bytes"_a, "row_bytes"_a, "repeats"_a,
        nb::call_guard<nb::gil_scoped_release>());
  bind_attend(m);
  bind_window(m);
  bind_prompt(m);
  bind_linear(m);
}

}  // namespace magicpig
