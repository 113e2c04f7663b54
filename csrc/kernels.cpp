// The kernels of one instruction set. Compiled once per set with MAGICPIG_ISA = its name, MAGICPIG_VEC = its vector
// header and only that set's compiler flags. Everything but the exported table has internal linkage and no C++ library
// template is used: a weak symbol from here could otherwise be linked into code that runs on machines without these
// instructions.
#include "kernels.h"

#include <string.h>

#include MAGICPIG_VEC
#include "kernels_math.h"
#ifdef MAGICPIG_BF16_DOT
#include "kernels_bf16.h"
#endif
#include "kernels_attend.h"
#include "kernels_index.h"
#include "kernels_linear.h"
#include "kernels_norm.h"
#include "kernels_prompt.h"
#include "kernels_scan.h"

namespace magicpig {

namespace {
void exp_of(const float* x, size_t count, float* out) {
  for (size_t i = 0; i < count; i += kChunk) store(out + i, exp(load(x + i)));
}
}  // namespace

namespace MAGICPIG_ISA {
#define MAGICPIG_NAME_OF(isa) #isa
#define MAGICPIG_NAME(isa) MAGICPIG_NAME_OF(isa)
extern const Kernels kernels = {
    MAGICPIG_NAME(MAGICPIG_ISA),
    {attend<bf16>, attend<f16>, attend<float>},
    {log_inclusion_of_rows<bf16>, log_inclusion_of_rows<f16>, log_inclusion_of_rows<float>},
    {{pack<bf16, bf16>, pack<bf16, f16>, pack<bf16, float>},
     {pack<f16, bf16>, pack<f16, f16>, pack<f16, float>},
     {pack<float, bf16>, pack<float, f16>, pack<float, float>}},
    {add_rows<bf16>, add_rows<f16>, add_rows<float>},
    {centre<bf16>, centre<f16>, centre<float>},
    hash,
    encode,
    {scan_logs<1>, scan_logs<2>, scan_logs<4>},
    log_threshold,
    highest_score,
    error_terms,
    light_sums,
    {scan_draw<1>, scan_draw<2>, scan_draw<4>},
    exp_of,
    log_of,
    sizeof(LinearInput),
    prepare_inputs,
    linear,
    gated,
    attend_prompt,
    finish_prompt_row,
    rms_norm,
};
}  // namespace MAGICPIG_ISA

}  // namespace magicpig
