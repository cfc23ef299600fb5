// Schemas of torch.ops.bapo. Implementations are beside this file, one op each; their fake versions
// are in bapo_megatron/ops/extension.py.

#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY(bapo, library) {
  library.def(
      "logprob_partials(Tensor logits, Tensor? rows, Tensor target, int vocab_start, "
      "int vocab_size, float temperature) -> Tensor");
  library.def(
      "logprob_combine(Tensor partials, float temperature) -> (Tensor, Tensor, Tensor, Tensor)");
  library.def(
      "logits_backward_(Tensor(a!) logits, Tensor? rows, Tensor target, Tensor max, "
      "Tensor log_sum, Tensor entropy, Tensor? grad_logprob, Tensor? grad_entropy, "
      "int vocab_start, int vocab_size, float temperature) -> ()");
  library.def(
      "kl_partials(Tensor student, Tensor teacher, Tensor target, int vocab_start, int vocab_size, "
      "float temperature, str direction) -> Tensor");
  library.def(
      "kl_combine(Tensor partials, float temperature, str direction) "
      "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
  library.def(
      "kl_backward_(Tensor(a!) student, Tensor teacher, Tensor target, Tensor max, Tensor log_sum, "
      "Tensor entropy, Tensor teacher_max, Tensor teacher_log_sum, Tensor kl, "
      "Tensor? grad_logprob, Tensor? grad_entropy, Tensor grad_kl, int vocab_start, "
      "int vocab_size, float temperature, str direction) -> ()");
  library.def(
      "contributions_(Tensor(a!) table, Tensor grid, Tensor logprob, Tensor behaviour_logprob, "
      "Tensor advantage, Tensor mask, str weight) -> ()");
  library.def(
      "search_bounds(Tensor table, Tensor grid, float target, str contribution, str measure) "
      "-> Tensor");
  library.def("importance_ratio(Tensor logprob, Tensor behaviour_logprob) -> Tensor");
}
