// Fits y = 3 x by gradient descent through one shard server: gradwire-quick grpc://localhost:7070
#include <cstdio>
#include <vector>

#include "gradwire/session.h"

int main(int argc, char** argv) {
  std::vector<float> weight = {0.0f};
  gradwire::SessionOptions options;
  options.servers.assign(argv + 1, argv + argc);
  options.worker = "worker-0";
  options.memory = {weight};
  options.job.set_name("quick-cc");
  options.job.mutable_optimizer()->set_kind(gradwire::v1::OPTIMIZER_SGD);
  options.job.add_tensors()->set_name("weight");
  options.job.mutable_tensors(0)->add_shape(1);
  auto session = gradwire::Session::Join(std::move(options));
  if (!session.ok()) return std::fprintf(stderr, "%s\n", session.status().ToString().c_str()), 1;
  for (int step = 0; step < 50; ++step) {
    const float gradient = 2 * (weight[0] - 3.0f);
    const absl::Status status = (*session)->Exchange({{&gradient}}, {{0.1f}});
    if (!status.ok()) return std::fprintf(stderr, "%s\n", status.ToString().c_str()), 1;
  }
  std::printf("weight %.4f\n", weight[0]);
}
