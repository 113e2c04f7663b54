// Native tests of linear layers, gated MLPs and norms, made to run under sanitizers: every supported instruction set
// against plain loops in double, at sizes around the borders of panels, tiles and blocks; then many threads at once.
#include "linear.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "bf16_rows.h"
#include "dispatch.h"
#include "mlp.h"
#include "norm.h"
#include "threads.h"

using namespace magicpig;

namespace {

bool same(const bf16* a, const bf16* b, size_t count) { return std::memcmp(a, b, count * sizeof(bf16)) == 0; }

struct Layer {
  size_t out, in;
  std::vector<bf16> weight, bias;

  Layer(size_t out, size_t in, uint32_t seed)
      : out(out), in(in), weight(gaussian(out * in, seed)), bias(gaussian(out, seed + 1)) {}
  Matrix matrix(bool with_bias = true) const { return {weight.data(), with_bias ? bias.data() : nullptr, out, in}; }

  double apply(const double* x, size_t output) const {
    double sum = value(bias[output]);
    for (size_t i = 0; i < in; ++i) sum += x[i] * value(weight[output * in + i]);
    return sum;
  }
};

bool close(double result, double truth, double absolute) {
  return std::abs(result - truth) <= absolute + std::abs(truth) / 256;
}

void test_linear() {
  for (const std::string& isa : tested_isas()) {
    set_isa(isa);
    for (size_t in : {1, 2, 15, 33, 1100}) {
      for (size_t out : {1, 16, 17, 33, 70}) {
        const Layer layer(out, in, static_cast<uint32_t>(in + out));
        const PackedLinear packed(layer.matrix());
        for (size_t rows : {0, 1, 3, 12, 13, 25, 200}) {
          if (rows > 25 && in > 33) continue;
          const std::vector<bf16> x = gaussian(rows * in, 5);
          std::vector<bf16> result(rows * out);
          packed.forward(x.data(), rows, result.data());
          for (size_t r = 0; r < rows; ++r) {
            std::vector<double> row(in);
            for (size_t i = 0; i < in; ++i) row[i] = value(x[r * in + i]);
            for (size_t o = 0; o < out; ++o)
              CHECK(close(value(result[r * out + o]), layer.apply(row.data(), o), 1e-5 * static_cast<double>(in)));
          }
        }
      }
    }
  }
}

// A row's result is the same bit for bit in any company and with any number of threads.
void test_rows_do_not_depend_on_company() {
  const size_t rows = 900, in = 1101, out = 50;
  const Layer layer(out, in, 3);
  const std::vector<bf16> x = gaussian(rows * in, 4);
  for (const std::string& isa : tested_isas()) {
    set_isa(isa);
    const PackedLinear packed(layer.matrix());
    const size_t count = isa == "scalar" ? 30 : rows;  // plain code is slow here
    set_num_threads(1);
    std::vector<bf16> all(count * out), part(count * out);
    packed.forward(x.data(), count, all.data());
    for (size_t threads : {1, 3}) {
      set_num_threads(threads);
      for (size_t size : {1, 2, 7, 12, 13, 16, 29}) {
        packed.forward(x.data() + (count - size) * in, size, part.data());
        CHECK(same(part.data(), all.data() + (count - size) * out, size * out));
      }
      packed.forward(x.data(), count, part.data());
      CHECK(same(part.data(), all.data(), count * out));
    }
  }
}

void test_lookup() {
  const Layer layer(40, 7, 9);
  const PackedLinear packed(layer.matrix());
  const std::vector<int64_t> ids = {39, 0, 15, 16, 31, 32, 7, 7};
  std::vector<bf16> rows(ids.size() * 7);
  packed.lookup(ids.data(), ids.size(), rows.data());
  for (size_t i = 0; i < ids.size(); ++i) CHECK(same(rows.data() + i * 7, layer.weight.data() + ids[i] * 7, 7));
  for (int64_t bad : {int64_t{-1}, int64_t{40}, std::numeric_limits<int64_t>::min()}) {
    bool refused = false;
    try {
      packed.lookup(&bad, 1, rows.data());
    } catch (const std::invalid_argument&) {
      refused = true;
    }
    CHECK(refused);
  }
}

double activated(Activation activation, double x) {
  if (activation == kSilu) return x / (1 + std::exp(-x));
  return 0.5 * x * (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
}

void test_mlp() {
  for (const std::string& isa : tested_isas()) {
    set_isa(isa);
    for (Activation activation : {kSilu, kGeluTanh}) {
      for (size_t hidden : {1, 16, 31, 40}) {
        const size_t in = 21, out = 35;
        const Layer gate(hidden, in, 1), up(hidden, in, 2), down(out, hidden, 3);
        const GatedMLP mlp(gate.matrix(), up.matrix(), down.matrix(), activation);
        for (size_t rows : {1, 2, 13, 800}) {
          const std::vector<bf16> x = gaussian(rows * in, 4);
          std::vector<bf16> result(rows * out);
          mlp.forward(x.data(), rows, result.data());
          for (size_t r = 0; r < rows; r += 1 + rows / 20) {
            std::vector<double> row(in), inner(hidden);
            for (size_t i = 0; i < in; ++i) row[i] = value(x[r * in + i]);
            double size = 1;
            for (size_t h = 0; h < hidden; ++h) {
              inner[h] = activated(activation, gate.apply(row.data(), h)) * up.apply(row.data(), h);
              size += std::abs(inner[h] * 3);
            }
            for (size_t o = 0; o < out; ++o)
              CHECK(close(value(result[r * out + o]), down.apply(inner.data(), o), size / 256));
          }
        }
      }
    }
  }
}

void test_norm() {
  for (const std::string& isa : tested_isas()) {
    set_isa(isa);
    for (size_t dim : {1, 5, 16, 63, 64, 65, 576}) {
      for (size_t rows : {0, 1, 3, 200}) {
        const std::vector<bf16> x = gaussian(rows * dim, 1, 0.01f), weight = gaussian(dim, 2);
        std::vector<bf16> out(rows * dim);
        for (NormScale scale : {kTimesWeight, kTimesOnePlusWeight}) {
          rms_norm(x.data(), rows, dim, weight.data(), scale, 1e-4f, out.data());
          for (size_t r = 0; r < rows; ++r) {
            double squares = 0;
            for (size_t i = 0; i < dim; ++i) squares += value(x[r * dim + i]) * value(x[r * dim + i]);
            const double inv = 1 / std::sqrt(squares / static_cast<double>(dim) + 1e-4);
            for (size_t i = 0; i < dim; ++i) {
              const double factor = value(weight[i]) + (scale == kTimesOnePlusWeight);
              const double truth = value(x[r * dim + i]) * inv * factor;
              CHECK(std::abs(value(out[r * dim + i]) - truth) <= std::abs(truth) / 120 + 1e-30);
            }
          }
        }
      }
    }
  }
}

// Odd values come out as odd values, of their own row alone.
void test_nan_and_infinity() {
  const Layer gate(5, 3, 1), up(5, 3, 2), down(4, 5, 3);
  for (const std::string& isa : tested_isas()) {
    set_isa(isa);
    const GatedMLP mlp(gate.matrix(false), up.matrix(false), down.matrix(false), kGeluTanh);
    const PackedLinear linear(gate.matrix(false));
    std::vector<bf16> x = gaussian(3 * 3, 8), out(3 * 5), clean(3 * 5);
    linear.forward(x.data(), 3, clean.data());
    for (float odd : {NAN, INFINITY, -INFINITY}) {
      x[4] = {static_cast<uint16_t>(std::isnan(odd) ? 0x7fc0 : odd > 0 ? 0x7f80 : 0xff80)};
      linear.forward(x.data(), 3, out.data());
      for (size_t o = 0; o < 5; ++o) {
        CHECK(std::isnan(odd) ? std::isnan(value(out[5 + o])) : std::isinf(value(out[5 + o])));
        CHECK(out[o].bits == clean[o].bits && out[10 + o].bits == clean[10 + o].bits);
      }
      mlp.forward(x.data(), 3, out.data());
      for (size_t o = 0; o < 4; ++o) CHECK(std::isfinite(value(out[o])) && std::isfinite(value(out[8 + o])));
      rms_norm(x.data(), 3, 3, gate.weight.data(), kTimesWeight, 1e-6f, out.data());
      CHECK(std::isnan(value(out[4])) && std::isfinite(value(out[0])) && std::isfinite(value(out[6])));
    }
  }
}

// Layers are made, used and let go on several threads while the pool changes its size.
void test_concurrency() {
  const Layer gate(100, 64, 1), up(100, 64, 2), down(64, 100, 3);
  const GatedMLP shared(gate.matrix(), up.matrix(), down.matrix(), kSilu);
  const std::vector<bf16> x = gaussian(40 * 64, 4);
  std::vector<bf16> truth(40 * 64);
  shared.forward(x.data(), 40, truth.data());
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      std::vector<bf16> out(40 * 64);
      for (size_t i = 0; i < 30; ++i) {
        const auto own = std::make_unique<GatedMLP>(gate.matrix(), up.matrix(), down.matrix(), kSilu);
        const size_t rows = 1 + (i * 7 + static_cast<size_t>(t)) % 40;
        (t % 2 ? *own : shared).forward(x.data(), rows, out.data());
        CHECK(same(out.data(), truth.data(), rows * 64));
        if (t == 0) set_num_threads(1 + i % 3);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace

int main() {
  set_num_threads(2);
  test_linear();
  test_rows_do_not_depend_on_company();
  test_lookup();
  test_mlp();
  test_norm();
  test_nan_and_infinity();
  test_concurrency();
  std::printf("%d checks on %zu instruction sets passed\n", checks.load(), tested_isas().size());
}
