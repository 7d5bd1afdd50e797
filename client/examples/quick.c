/* Fits y = 3 x by gradient descent through one shard server: gradwire-quick-c grpc://localhost:7070 */
#include <stdio.h>

#include "gradwire/c.h"

static int failed(void) {
  fprintf(stderr, "%s\n", gradwire_last_error());
  return 1;
}

int main(int argc, char** argv) {
  float weight = 0;
  const gradwire_tensor tensor = {&weight, 1};
  gradwire_session* session;
  gradwire_options options = gradwire_no_options();
  options.servers = (const char* const*)argv + 1;
  options.server_count = (size_t)argc - 1;
  options.worker = "worker-0";
  options.job =
      "{\"name\": \"quick-c\", \"optimizer\": {\"kind\": \"OPTIMIZER_SGD\"},"
      " \"tensors\": [{\"name\": \"weight\", \"shape\": [1]}]}";
  options.tensors = &tensor;
  options.tensor_count = 1;
  if (gradwire_join(&options, &session) != GRADWIRE_OK) return failed();
  for (int step = 0; step < 50; ++step) {
    const float gradient = 2 * (weight - 3), learning_rate = 0.1f;
    const float* const gradients[] = {&gradient};
    if (gradwire_exchange(session, gradients, 1, &learning_rate, 1) != GRADWIRE_OK) return failed();
  }
  if (gradwire_leave(session, 1) != GRADWIRE_OK) return failed();
  gradwire_free(session);
  printf("weight %.4f\n", weight);
  return 0;
}
