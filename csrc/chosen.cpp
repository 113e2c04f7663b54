#include "chosen.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>

#include "dispatch.h"
#include "queries.h"
#include "states.h"
#include "threads.h"

namespace magicpig {

namespace {

// Rows of one run, by their numbers in it.
struct Part {
  std::vector<uint16_t> ids;
  std::vector<float> log_probability;
};

// The chosen rows of one head, run by run. A run of more rows than 16 bits number is cut.
class Parts {
 public:
  static constexpr size_t kMost = 65536;

  void split(const std::vector<Run>& runs, const Chosen& chosen, size_t head) {
    firsts_.clear();
    size_t total = 0;
    for (const Run& run : runs) {
      for (size_t first = 0; first < run.num_tokens; first += kMost) firsts_.push_back({&run, total + first, first});
      total += run.num_tokens;
    }
    if (parts_.size() < firsts_.size()) parts_.resize(firsts_.size());
    for (size_t i = 0; i < firsts_.size(); ++i) parts_[i].ids.clear(), parts_[i].log_probability.clear();
    const int32_t* rows = chosen.rows + head * chosen.stride;
    const float* logs = chosen.log_probability + head * chosen.stride;
    for (int32_t j = 0; j < chosen.counts[head]; ++j) {
      if (rows[j] < 0 || static_cast<size_t>(rows[j]) >= total)
        throw std::invalid_argument("row " + std::to_string(rows[j]) + " is not among the " + std::to_string(total) +
                                    " tokens");
      if (!(logs[j] <= 0 && logs[j] >= -kLargest))
        throw std::invalid_argument("log_probability must be 0 at most and finite, not " + std::to_string(logs[j]));
      size_t i = firsts_.size() - 1;
      while (firsts_[i].first > static_cast<size_t>(rows[j])) --i;
      parts_[i].ids.push_back(static_cast<uint16_t>(static_cast<size_t>(rows[j]) - firsts_[i].first));
      parts_[i].log_probability.push_back(logs[j]);
    }
  }

  struct Place {
    const Run* run;
    size_t first, in_run;  // of its first row: in the sequence, and in the run
  };
  const std::vector<Place>& places() const { return firsts_; }
  Part& operator[](size_t i) { return parts_[i]; }

 private:
  std::vector<Place> firsts_;
  std::vector<Part> parts_;
};

}  // namespace

void attend_chosen(const Geometry& geometry, const std::vector<std::vector<Run>>& batch, const char* queries,
                   RowType type, Scoring scoring, const Chosen& chosen, float* out, float* lse) {
  const Kernels& k = kernels();
  const PreparedQueries prepared(k, geometry, queries, type, batch.size() * geometry.num_heads, false, scoring.scale);
  parallel_for(batch.size() * geometry.num_heads, [&](size_t head) {
    static thread_local Parts parts;
    const auto kv_head = static_cast<uint32_t>(head % geometry.num_heads / geometry.group());
    parts.split(batch[head / geometry.num_heads], chosen, head);
    const size_t stride = (geometry.dim() + 31) / 32 * 32;
    std::vector<float> outs(parts.places().size() * stride);
    std::vector<PartialState> states(parts.places().size());
    for (size_t i = 0; i < states.size(); ++i) {
      const Parts::Place& place = parts.places()[i];
      Part& part = parts[i];
      states[i].out = outs.data() + i * stride;
      if (part.ids.empty()) continue;
      const size_t count = part.ids.size();
      part.ids.resize(count + 2 * kChunk);  // kernels may read some beyond
      part.log_probability.resize(count + 2 * kChunk);
      RowsArgs args = rows_args(geometry, *place.run, kv_head, prepared, head);
      args.rows = static_cast<const char*>(args.rows) + place.in_run * geometry.row_bytes();
      args.scale = scoring.scale;
      args.softcap = scoring.softcap;
      choose({part.ids.data(), count, {}, part.log_probability.data(), 0}, args);
      k.attend[geometry.type](args, &states[i]);
      part.ids.resize(count);
    }
    const auto each = [&](auto&& visit) {
      for (size_t i = 0; i < states.size(); ++i)
        if (!parts[i].ids.empty()) visit(states[i]);
    };
    lse[head] = merge_states(each, geometry.head_dim, out + head * geometry.head_dim);
  });
}

}  // namespace magicpig
