#include "dispatch.h"

#if defined(MAGICPIG_X86)
#include <cpuid.h>
#endif

#include <atomic>
#include <cstdlib>
#include <stdexcept>

namespace magicpig {

namespace {

#if defined(MAGICPIG_X86)
bool supports_f16c() {  // not every compiler's __builtin_cpu_supports knows it
  unsigned eax, ebx, ecx, edx;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) && (ecx & bit_F16C);
}
#endif

std::vector<const Kernels*> supported_kernels() {
  std::vector<const Kernels*> all = {&scalar::kernels};
#if defined(MAGICPIG_X86)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && supports_f16c()) {
    all.push_back(&avx2::kernels);
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl")) {
      all.push_back(&avx512::kernels);
      if (__builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni"))
        all.push_back(&avx512_bf16::kernels);
    }
  }
#elif defined(MAGICPIG_ARM64)
  all.push_back(&neon::kernels);
#endif
  return all;
}

const Kernels* find(const std::string& name, const char* what) {
  std::string names;
  for (const Kernels* candidate : supported_kernels()) {
    if (candidate->name == name) return candidate;
    names += (names.empty() ? "" : ", ") + std::string(candidate->name);
  }
  throw std::invalid_argument(std::string(what) + " is '" + name +
                              "', which this machine does not support; choose one of: " + names);
}

std::atomic<const Kernels*> chosen{nullptr};

}  // namespace

const Kernels& kernels() {
  const Kernels* current = chosen.load(std::memory_order_acquire);
  if (current == nullptr) {
    const char* name = std::getenv("MAGICPIG_ISA");
    const Kernels* first = name && *name ? find(name, "MAGICPIG_ISA") : supported_kernels().back();
    if (chosen.compare_exchange_strong(current, first)) current = first;
  }
  return *current;
}

std::vector<std::string> supported_isas() {
  std::vector<std::string> names;
  for (const Kernels* candidate : supported_kernels()) names.push_back(candidate->name);
  return names;
}

void set_isa(const std::string& name) { chosen.store(find(name, "isa"), std::memory_order_release); }

}  // namespace magicpig
