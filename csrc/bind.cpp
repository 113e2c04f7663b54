// The Python border: arguments in, C++ objects out. It checks what memory safety needs; magicpig.kv gives friendlier
// messages.
#include "bind.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <algorithm>

#include "attention.h"
#include "bind_linear.h"
#include "chosen.h"
#include "dispatch.h"
#include "layer_kv.h"
#include "roofs.h"
#include "tables.h"
#include "threads.h"

namespace magicpig {

using namespace nb::literals;

namespace {

template <class T, size_t N>
using Out = nb::ndarray<nb::pytorch, T, nb::ndim<N>, nb::c_contig, nb::device::cpu>;
template <class T, size_t N>
using In = nb::ndarray<nb::pytorch, const T, nb::ndim<N>, nb::c_contig, nb::device::cpu>;
template <class T>
using Vector = nb::ndarray<nb::pytorch, T, nb::ndim<1>>;
using Codes = nb::ndarray<nb::pytorch, int32_t, nb::ndim<2>>;

// A tensor that owns the values.
template <size_t N, class T>
nb::ndarray<nb::pytorch, T, nb::ndim<N>> owned(std::vector<T> values, std::initializer_list<size_t> shape) {
  auto* kept = new std::vector<T>(std::move(values));
  nb::capsule owner(kept, [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
  return nb::ndarray<nb::pytorch, T, nb::ndim<N>>(kept->data(), shape, owner);
}

void append(LayerKV& kv, const Array& keys, const Array& values) {
  const TensorView key_view = view(keys, kv.geometry(), "keys"), value_view = view(values, kv.geometry(), "values");
  const size_t count = keys.shape(1);
  if (values.shape(1) != count) refuse("values must have as many tokens as keys");
  nb::gil_scoped_release release;
  kv.append(key_view, value_view, count);
}

// One segment, whose keys another device has hashed.
void append_hashed(LayerKV& kv, const Array& keys, const Array& values, const In<uint16_t, 3>& signs) {
  const Geometry& geometry = kv.geometry();
  const TensorView key_view = view(keys, geometry, "keys"), value_view = view(values, geometry, "values");
  const size_t count = keys.shape(1);
  if (values.shape(1) != count) refuse("values must have as many tokens as keys");
  if (!geometry.lsh || count < 1 || count > Segment::kMaxTokens)
    refuse("a segment of hash tables has from 1 to 65,536 tokens");
  if (signs.shape(0) != geometry.num_kv_heads || signs.shape(1) != geometry.lsh->num_groups || signs.shape(2) != count)
    refuse("signs must have shape [num_kv_heads, projections / 16, tokens]");
  nb::gil_scoped_release release;
  const auto segment =
      std::make_shared<Segment>(geometry, Source{{}, key_view, value_view}, 0, static_cast<uint32_t>(count));
  segment->build_index(geometry, signs.data());
  kv.adopt(segment);
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

const Geometry& checked_batch(const std::vector<const LayerKV*>& batch, float scale, float softcap) {
  if (batch.empty()) refuse("kvs must not be empty");
  if (!(scale > 0 && scale <= kMaxScale)) refuse("scale must be above 0 and at most 100");
  if (!(softcap >= 0 && softcap <= 1e6f)) refuse("softcap must be from 0 to 1e6");
  if (std::count(batch.begin(), batch.end(), nullptr)) refuse("kvs must not hold None");
  const Geometry& geometry = batch[0]->geometry();
  for (const LayerKV* kv : batch)
    if (!same(geometry, kv->geometry())) refuse("kvs must agree in heads, head_dim, dtype and index");
  return geometry;
}

// snapshots: keep the runs' memory alive.
std::vector<std::vector<Run>> runs_of_batch(const std::vector<const LayerKV*>& batch,
                                            std::vector<std::shared_ptr<const SegmentList>>& snapshots) {
  std::vector<std::vector<Run>> runs;
  for (const LayerKV* kv : batch) {
    snapshots.push_back(kv->segments());
    runs.push_back(runs_of(*snapshots.back()));
  }
  return runs;
}

// Rows that were drawn elsewhere: ids, log_probability [batch, num_heads, room], starts, counts [batch, num_heads,
// pieces].
using DrawnArrays = std::tuple<In<uint16_t, 3>, In<float, 3>, In<int32_t, 3>, In<int32_t, 3>>;

DrawnRows checked_rows(const DrawnArrays& arrays, const std::vector<std::vector<Run>>& runs, size_t heads) {
  const auto& [ids, log_probability, starts, counts] = arrays;
  const auto per_head = [&](const auto& array) { return array.shape(0) == runs.size() && array.shape(1) == heads; };
  if (!per_head(ids) || !per_head(log_probability) || !per_head(starts) || !per_head(counts) ||
      log_probability.shape(2) != ids.shape(2) || counts.shape(2) != starts.shape(2)) {
    refuse(
        "drawn must be ids and log_probability [batch, num_heads, room], starts and counts [batch, num_heads, pieces]");
  }
  for (const auto& sequence : runs) {
    size_t pieces = 0;
    for (const Run& run : sequence)
      if (run.index) pieces += num_pieces(run.num_tokens);
    if (pieces > starts.shape(2)) refuse("drawn has fewer pieces than the tokens that are drawn from");
  }
  return {ids.data(), log_probability.data(), starts.data(), counts.data(), ids.shape(2), starts.shape(2)};
}

std::tuple<double, double, double, std::vector<size_t>> attend_batch(
    const std::vector<const LayerKV*>& batch, const Array& queries, float scale, float softcap, bool exact,
    const Out<float, 3>& out, const Out<float, 2>& lse, const Out<int64_t, 2>& rows_read,
    const Out<int64_t, 2>& visited, const Out<float, 2>& predicted, const std::optional<In<uint16_t, 2>>& signs,
    const std::optional<DrawnArrays>& drawn) {
  const Geometry& geometry = checked_batch(batch, scale, softcap);
  const size_t size = batch.size(), heads = geometry.num_heads;
  const auto per_head = [&](const auto& array) { return array.shape(0) == size && array.shape(1) == heads; };
  if (!per_head(out) || out.shape(2) != geometry.head_dim || !per_head(lse) || !per_head(rows_read) ||
      !per_head(visited) || !per_head(predicted)) {
    refuse("out, lse, rows_read, visited and predicted must match the batch");
  }
  if (signs && (!geometry.lsh || signs->shape(0) != geometry.lsh->num_groups || signs->shape(1) != size * heads)) {
    refuse("signs must have shape [projections / 16, batch * num_heads], for an index of hash tables");
  }
  if (drawn && (!geometry.scan || exact)) refuse("drawn is for an index of codes, and not where all rows are read");
  const char* data = query_data(queries, size, geometry);
  const RowType type = type_of(queries, "queries");
  nb::gil_scoped_release release;
  std::vector<std::shared_ptr<const SegmentList>> snapshots;
  const std::vector<std::vector<Run>> runs = runs_of_batch(batch, snapshots);
  const DrawnRows rows = drawn ? checked_rows(*drawn, runs, heads) : DrawnRows{};
  const Timing timing = attend(geometry, runs, data, type, {scale, softcap}, exact,
                               {out.data(), lse.data(), rows_read.data(), visited.data(), predicted.data()},
                               {signs ? signs->data() : nullptr, drawn ? &rows : nullptr});
  std::vector<size_t> tokens;
  for (const auto& segments : snapshots) tokens.push_back(num_tokens(*segments));
  return {timing.draw, timing.drawn, timing.exact, tokens};
}

void attend_rows(const std::vector<const LayerKV*>& batch, const Array& queries, float scale, float softcap,
                 const In<int32_t, 3>& rows, const In<float, 3>& log_probability, const In<int32_t, 2>& counts,
                 const Out<float, 3>& out, const Out<float, 2>& lse) {
  const Geometry& geometry = checked_batch(batch, scale, softcap);
  const size_t size = batch.size(), heads = geometry.num_heads;
  const auto per_head = [&](const auto& array) { return array.shape(0) == size && array.shape(1) == heads; };
  if (!per_head(out) || out.shape(2) != geometry.head_dim || !per_head(lse) || !per_head(rows) ||
      !per_head(log_probability) || log_probability.shape(2) != rows.shape(2) || !per_head(counts)) {
    refuse("rows, log_probability, counts, out and lse must match the batch");
  }
  for (size_t i = 0; i < counts.size(); ++i)
    if (counts.data()[i] < 0 || static_cast<size_t>(counts.data()[i]) > rows.shape(2))
      refuse("counts must be from 0 to the rows that there is room for");
  const char* data = query_data(queries, size, geometry);
  const RowType type = type_of(queries, "queries");
  const Chosen chosen = {rows.data(), log_probability.data(), counts.data(), rows.shape(2)};
  nb::gil_scoped_release release;
  std::vector<std::shared_ptr<const SegmentList>> snapshots;
  attend_chosen(geometry, runs_of_batch(batch, snapshots), data, type, {scale, softcap}, chosen, out.data(),
                lse.data());
}

std::vector<std::pair<Vector<int32_t>, Vector<float>>> sample_rows(const LayerKV& kv, const Array& queries,
                                                                   float scale) {
  if (!(scale > 0 && scale <= kMaxScale)) refuse("scale must be above 0 and at most 100");
  const char* data = query_data(queries, 1, kv.geometry());
  const RowType type = type_of(queries, "queries");
  std::vector<Sample> samples;
  {
    nb::gil_scoped_release release;
    const auto segments = kv.segments();
    samples = sample(kv.geometry(), runs_of(*segments), data, type, scale);
  }
  std::vector<std::pair<Vector<int32_t>, Vector<float>>> out;
  for (Sample& head : samples) {
    const size_t count = head.rows.size();
    out.emplace_back(owned<1>(std::move(head.rows), {count}), owned<1>(std::move(head.log_probability), {count}));
  }
  return out;
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
      .def("codes", &codes, "x"_a.noconvert(), "Buckets [n, num_tables] of vectors x [n, head_dim]; for tests.");

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
      .def("append_hashed", &append_hashed, "keys"_a.noconvert(), "values"_a.noconvert(), "signs"_a.noconvert(),
           "Adds a segment. signs: of its centred keys' projections [num_kv_heads, projections / 16, tokens], sixteen "
           "to a number.")
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

  m.def("empty_bytes", &empty_bytes, "bytes"_a, "Memory for a segment that is made elsewhere; contents undefined.");
  m.def("attend", &attend_batch, "kvs"_a, "queries"_a.noconvert(), "scale"_a, "softcap"_a, "exact"_a,
        "out"_a.noconvert(), "lse"_a.noconvert(), "rows_read"_a.noconvert(), "visited"_a.noconvert(),
        "predicted"_a.noconvert(), "signs"_a.noconvert() = nb::none(), "drawn"_a = nb::none(),
        "signs: of the queries' projections, where they are known already, sixteen to a number. drawn: ids in their "
        "segments and log probabilities of rows that were drawn elsewhere, and "
        "where each piece of 1,024 tokens has its own. Fills out, lse, "
        "rows_read, visited (entries of hash buckets) and, where there is a target error, predicted; "
        "returns the thread-seconds of "
        "drawing, of attention over drawn rows and over rows "
        "read whole, and the tokens of each kv.");
  m.def("attend_rows", &attend_rows, "kvs"_a, "queries"_a.noconvert(), "scale"_a, "softcap"_a, "rows"_a.noconvert(),
        "log_probability"_a.noconvert(), "counts"_a.noconvert(), "out"_a.noconvert(), "lse"_a.noconvert(),
        "Fills out and lse: attention over counts[i, h] rows [batch, num_heads, room], each weighted by one over its "
        "probability.");
  m.def("sample", &sample_rows, "kv"_a, "queries"_a.noconvert(), "scale"_a,
        "Per head: row ids and log inclusion probabilities.");

  m.def("available_memory", &available_memory, "Bytes that can still be had.");
  m.def("isa", [] { return std::string(kernels().name); });
  m.def("supported_isas", &supported_isas);
  m.def("set_isa", &set_isa, "name"_a);
  m.def("num_threads", &num_threads);
  m.def("set_num_threads", &set_num_threads, "count"_a);
  m.def("rest_threads", &rest_threads, "count"_a,
        "So many of the pool's threads leave their cores to others, until it is called again.");
  m.def(
      "wait_for",
      [](const In<int64_t, 1>& number, int64_t value, double seconds) {
        if (number.size() == 0) refuse("number must not be empty");
        const int64_t* place = number.data();
        nb::gil_scoped_release release;
        return wait_for(place, value, seconds);
      },
      "number"_a.noconvert(), "value"_a, "seconds"_a,
      "Waits until another device has written the value to number[0]; False where that takes longer than `seconds`.");
  m.def(
      "tell",
      [](const Out<int64_t, 1>& number, int64_t value) {
        if (number.size() == 0) refuse("number must not be empty");
        tell(number.data(), value);
      },
      "number"_a.noconvert(), "value"_a,
      "Writes the value to number[0], behind all that was written before, for another device.");

  m.def("exp", &exp_of, "x"_a.noconvert(), "out"_a.noconvert(), "The kernels' exponential, for tests.");
  m.def("log_inclusion_probability", &log_inclusion_probability, "angle_over_pi"_a, "bits_per_table"_a, "num_tables"_a,
        "min_collisions"_a);
  m.def("stream_read_roof", &stream_read_roof, "bytes"_a, "repeats"_a, nb::call_guard<nb::gil_scoped_release>());
  m.def("gather_read_roof", &gather_read_roof, "bytes"_a, "row_bytes"_a, "repeats"_a,
        nb::call_guard<nb::gil_scoped_release>());
  bind_window(m);
  bind_prompt(m);
  bind_linear(m);
}

}  // namespace magicpig
