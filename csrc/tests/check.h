// Checks that count, and end the process where one does not hold; and on what they are made.
#pragma once

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "dispatch.h"

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

// All instruction sets that this machine has, or the one that MAGICPIG_TEST_ISA names.
inline std::vector<std::string> tested_isas() {
  const char* one = std::getenv("MAGICPIG_TEST_ISA");
  return one ? std::vector<std::string>{one} : supported_isas();
}

}  // namespace magicpig
