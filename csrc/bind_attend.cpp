// The Python border of attention over far contexts.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>

#include "attention.h"
#include "bind.h"
#include "chosen.h"
#include "layer_kv.h"
#include "stopwatch.h"
#include "threads.h"

namespace magicpig {

using namespace nb::literals;

namespace {

template <class T>
using Vector = nb::ndarray<nb::pytorch, T, nb::ndim<1>>;

// A copy: without Python's lock the batch may be let go of.
Geometry checked_batch(const std::vector<const LayerKV*>& batch, float scale, float softcap) {
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

// What a call of attention reads and fills, as Python gives it.
struct BatchArrays {
  const Array& queries;
  const Out<float, 3>& out;
  const Out<float, 2>& lse;
  const Out<int64_t, 2>&rows_read, &visited;
  const Out<float, 2>& predicted;
  const std::optional<In<uint16_t, 2>>& signs;
  const std::optional<DrawnArrays>& drawn;
};

using Attended = std::tuple<double, double, double, std::vector<size_t>>;

// Around a call, when all is checked, without Python's lock.
struct AtOnce {
  bool begin() { return true; }  // whether the drawn rows are to be used
  void end() {}
};

template <class Around>
Attended attend_checked(const std::vector<const LayerKV*>& batch, Scoring scoring, bool exact,
                        const BatchArrays& arrays, Around&& around) {
  const Geometry geometry = checked_batch(batch, scoring.scale, scoring.softcap);
  const size_t size = batch.size(), heads = geometry.num_heads;
  const auto per_head = [&](const auto& array) { return array.shape(0) == size && array.shape(1) == heads; };
  if (!per_head(arrays.out) || arrays.out.shape(2) != geometry.head_dim || !per_head(arrays.lse) ||
      !per_head(arrays.rows_read) || !per_head(arrays.visited) || !per_head(arrays.predicted)) {
    refuse("out, lse, rows_read, visited and predicted must match the batch");
  }
  const auto& signs = arrays.signs;
  if (signs && (!geometry.lsh || signs->shape(0) != geometry.lsh->num_groups || signs->shape(1) != size * heads)) {
    refuse("signs must have shape [projections / 16, batch * num_heads], for an index of hash tables");
  }
  if (arrays.drawn && (!geometry.scan || exact))
    refuse("drawn is for an index of codes, and not where all rows are read");
  const char* data = query_data(arrays.queries, size, geometry);
  const RowType type = type_of(arrays.queries, "queries");
  std::vector<std::shared_ptr<const SegmentList>> snapshots;
  const std::vector<std::vector<Run>> runs = runs_of_batch(batch, snapshots);
  nb::gil_scoped_release release;
  const DrawnRows rows = arrays.drawn ? checked_rows(*arrays.drawn, runs, heads) : DrawnRows{};
  const bool use_drawn = around.begin() && arrays.drawn;
  const Timing timing = attend(
      geometry, runs, data, type, scoring, exact,
      {arrays.out.data(), arrays.lse.data(), arrays.rows_read.data(), arrays.visited.data(), arrays.predicted.data()},
      {signs ? signs->data() : nullptr, use_drawn ? &rows : nullptr});
  around.end();
  std::vector<size_t> tokens;
  for (const auto& segments : snapshots) tokens.push_back(num_tokens(*segments));
  return {timing.draw, timing.drawn, timing.exact, tokens};
}

Attended attend_batch(const std::vector<const LayerKV*>& batch, const Array& queries, float scale, float softcap,
                      bool exact, const Out<float, 3>& out, const Out<float, 2>& lse, const Out<int64_t, 2>& rows_read,
                      const Out<int64_t, 2>& visited, const Out<float, 2>& predicted,
                      const std::optional<In<uint16_t, 2>>& signs, const std::optional<DrawnArrays>& drawn) {
  return attend_checked(batch, {scale, softcap}, exact,
                        {queries, out, lse, rows_read, visited, predicted, signs, drawn}, AtOnce{});
}

// Where another device asks: arrays are looked at when its ticket is there, and it is told when they are filled.
struct WhenAsked {
  struct Late {};

  bool begin() {
    if (!wait_for(arrived, ticket, patience)) throw Late{};
    asked.emplace();
    return std::all_of(totals, totals + num_totals, [&](int32_t rows) { return static_cast<size_t>(rows) <= room; });
  }
  void end() {
    tell(answered, ticket);
    took = asked->seconds();
  }

  const int64_t* arrived;
  int64_t* answered;
  int64_t ticket;
  double patience;
  const int32_t* totals;
  size_t num_totals, room;
  std::optional<Stopwatch> asked{};
  double took = 0;
};

std::optional<std::pair<double, Attended>> serve(
    const In<int64_t, 1>& arrived, int64_t ticket, double patience, const Out<int64_t, 1>& answered,
    const std::vector<const LayerKV*>& batch, const Array& queries, float scale, float softcap,
    const Out<float, 3>& out, const Out<float, 2>& lse, const Out<int64_t, 2>& rows_read,
    const Out<int64_t, 2>& visited, const Out<float, 2>& predicted, const std::optional<In<uint16_t, 2>>& signs,
    const std::optional<DrawnArrays>& drawn, const std::optional<In<int32_t, 2>>& totals) {
  if (arrived.size() == 0 || answered.size() == 0) refuse("arrived and answered must not be empty");
  WhenAsked around{arrived.data(),
                   answered.data(),
                   ticket,
                   patience,
                   totals ? totals->data() : nullptr,
                   totals ? totals->size() : 0,
                   drawn ? std::get<0>(*drawn).shape(2) : 0};
  try {
    Attended found = attend_checked(batch, {scale, softcap}, false,
                                    {queries, out, lse, rows_read, visited, predicted, signs, drawn}, around);
    return std::pair{around.took, std::move(found)};
  } catch (const WhenAsked::Late&) {
    return std::nullopt;
  }
}

void attend_rows(const std::vector<const LayerKV*>& batch, const Array& queries, float scale, float softcap,
                 const In<int32_t, 3>& rows, const In<float, 3>& log_probability, const In<int32_t, 2>& counts,
                 const Out<float, 3>& out, const Out<float, 2>& lse) {
  const Geometry geometry = checked_batch(batch, scale, softcap);
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
  std::vector<std::shared_ptr<const SegmentList>> snapshots;
  const std::vector<std::vector<Run>> runs = runs_of_batch(batch, snapshots);
  nb::gil_scoped_release release;
  attend_chosen(geometry, runs, data, type, {scale, softcap}, chosen, out.data(), lse.data());
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

}  // namespace

void bind_attend(nb::module_& m) {
  m.def("attend", &attend_batch, "kvs"_a, "queries"_a.noconvert(), "scale"_a, "softcap"_a, "exact"_a,
        "out"_a.noconvert(), "lse"_a.noconvert(), "rows_read"_a.noconvert(), "visited"_a.noconvert(),
        "predicted"_a.noconvert(), "signs"_a.noconvert() = nb::none(), "drawn"_a.noconvert() = nb::none(),
        "signs: of the queries' projections, where they are known already, sixteen to a number. drawn: ids in their "
        "segments and log probabilities of rows that were drawn elsewhere, and "
        "where each piece of 1,024 tokens has its own. Fills out, lse, "
        "rows_read, visited (entries of hash buckets) and, where there is a target error, predicted; "
        "returns the thread-seconds of "
        "drawing, of attention over drawn rows and over rows "
        "read whole, and the tokens of each kv.");
  m.def(
      "serve", &serve, "arrived"_a.noconvert(), "ticket"_a, "patience"_a, "answered"_a.noconvert(), "kvs"_a,
      "queries"_a.noconvert(), "scale"_a, "softcap"_a, "out"_a.noconvert(), "lse"_a.noconvert(),
      "rows_read"_a.noconvert(), "visited"_a.noconvert(), "predicted"_a.noconvert(), "signs"_a.noconvert() = nb::none(),
      "drawn"_a.noconvert() = nb::none(), "totals"_a.noconvert() = nb::none(),
      "attend, of what another device asks: begins when arrived[0] is the ticket, and writes the ticket to answered[0] "
      "at the end. totals: rows that were drawn for each head; where one has more than there is room for, they are "
      "drawn here instead. Returns the seconds since then and what attend returns, or None where the ticket did not "
      "come "
      "within `patience` seconds.");
  m.def("attend_rows", &attend_rows, "kvs"_a, "queries"_a.noconvert(), "scale"_a, "softcap"_a, "rows"_a.noconvert(),
        "log_probability"_a.noconvert(), "counts"_a.noconvert(), "out"_a.noconvert(), "lse"_a.noconvert(),
        "Fills out and lse: attention over counts[i, h] rows [batch, num_heads, room], each weighted by one over its "
        "probability.");
  m.def("sample", &sample_rows, "kv"_a, "queries"_a.noconvert(), "scale"_a,
        "Per head: row ids and log inclusion probabilities.");
  m.def(
      "tell",
      [](const Out<int64_t, 1>& number, int64_t value) {
        if (number.size() == 0) refuse("number must not be empty");
        tell(number.data(), value);
      },
      "number"_a.noconvert(), "value"_a,
      "Writes the value to number[0], behind all that was written before, for another device.");
}

}  // namespace magicpig
