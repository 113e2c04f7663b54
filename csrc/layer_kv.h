// The far context of one sequence in one layer: a list of segments that grows at its end.
#pragma once

#include <memory>
#include <vector>

#include "segment.h"

namespace magicpig {

// Safe for many threads: readers take a snapshot of the list, appends make a new list and put it in place at the end. A
// lock is held for the copy of a pointer only.
class LayerKV {
 public:
  explicit LayerKV(Geometry geometry);  // std::invalid_argument for a geometry that cannot be

  // Adds `count` tokens. On any exception the object is as it was.
  void append(const TensorView& keys, const TensorView& values, size_t count);
  void adopt(std::shared_ptr<const Segment> segment);  // adds a segment as it is
  std::unique_ptr<LayerKV> fork() const;               // shares all segments

  const Geometry& geometry() const { return geometry_; }
  std::shared_ptr<const SegmentList> segments() const;

 private:
  const Geometry geometry_;
  std::shared_ptr<const SegmentList> list_;
};

}  // namespace magicpig
