// Checks that count, and end the process where one does not hold.
#pragma once

#include <atomic>
#include <cstdio>
#include <cstdlib>

namespace magicpig {

inline std::atomic<int> checks{0};

#define CHECK(condition)                                                                 \
  do {                                                                                   \
    ++checks;                                                                            \
    if (!(condition)) {                                                                  \
      std::fprintf(stderr, "%s:%d: %s does not hold\n", __FILE__, __LINE__, #condition); \
      std::exit(1);                                                                      \
    }                                                                                    \
  } while (0)

}  // namespace magicpig
