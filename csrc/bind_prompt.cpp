// The Python border of attention over prompts.
#include "bind.h"
#include "prompt_attention.h"
#include "tensor_ref.h"

namespace magicpig {

using namespace nb::literals;

namespace {

HeadsView heads_view(const TensorRef& tensor, size_t head_dim, const std::string& name) {
  if (tensor.ndim() != 3 || tensor.shape(2) != head_dim)
    refuse(name + " must have shape [heads, tokens, head_dim], with the head_dim of queries");
  if (tensor.stride(2) != 1 || tensor.stride(0) < 0 || tensor.stride(1) < 0)
    refuse(name + " must be contiguous in its last dimension");
  const char* data = tensor.bytes(name);
  if (tensor.row_type(name) != kBF16) throw nb::type_error((name + " must be bfloat16").c_str());
  return {reinterpret_cast<const bf16*>(data), static_cast<size_t>(tensor.stride(0)),
          static_cast<size_t>(tensor.stride(1))};
}

void attend_prompt(const TensorRef& queries, const TensorRef& keys, const TensorRef& values, float scale, float softcap,
                   size_t span, const TensorRef& out) {
  if (queries.ndim() != 3) refuse("queries must have shape [num_heads, num_queries, head_dim]");
  const size_t head_dim = queries.shape(2);
  if (head_dim == 0 || head_dim % 8 || head_dim > kMaxDim) refuse("head_dim must be a multiple of 8 up to 256");
  if (!(scale > 0 && scale <= kMaxScale)) refuse("scale must be above 0 and at most 100");
  if (!(softcap >= 0 && softcap <= 1e6f)) refuse("softcap must be from 0 to 1e6");
  Prompt prompt = {heads_view(queries, head_dim, "queries"),
                   heads_view(keys, head_dim, "keys"),
                   heads_view(values, head_dim, "values"),
                   queries.shape(0),
                   keys.shape(0),
                   queries.shape(1),
                   keys.shape(1),
                   static_cast<uint32_t>(head_dim),
                   scale,
                   softcap,
                   span,
                   nullptr};
  if (prompt.num_kv_heads == 0 || prompt.num_heads % prompt.num_kv_heads)
    refuse("keys must have a number of heads that divides that of queries");
  if (prompt.num_tokens < prompt.num_queries) refuse("keys must have at least as many tokens as queries");
  if (values.shape(0) != prompt.num_kv_heads || values.shape(1) != prompt.num_tokens)
    refuse("values must have the shape of keys");
  if (out.ndim() != 3 || out.shape(0) != prompt.num_queries || out.shape(1) != prompt.num_heads ||
      out.shape(2) != head_dim)
    refuse("out must have shape [num_queries, num_heads, head_dim]");
  prompt.out = out.bf16_data("out");
  nb::gil_scoped_release release;
  attend(prompt);
}

}  // namespace

void bind_prompt(nb::module_& m) {
  m.def("attend_prompt", &attend_prompt, "queries"_a.noconvert(), "keys"_a.noconvert(), "values"_a.noconvert(),
        "scale"_a, "softcap"_a, "span"_a, "out"_a.noconvert(),
        "Exact attention of queries [num_heads, num_queries, head_dim], the last of the tokens of keys and values\n"
        "[num_kv_heads, num_tokens, head_dim], into out [num_queries, num_heads, head_dim]; all bfloat16. softcap: 0\n"
        "for none. span: how many tokens a query sees, itself the last; 0: all.");
}

}  // namespace magicpig
