// What asking for the CUDA backend gives, with and without a GPU.
#include "kernels/cuda/cuda_backend.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace gradwire::kernels {
namespace {

TEST(MakeCudaBackend, WorksOrSaysWhyNotAndWhatToDo) {
  const auto backend = MakeBackend("cuda");
  if (backend.ok()) {
    EXPECT_EQ((*backend)->name(), "cuda");
    EXPECT_TRUE((*backend)->host_memory());
    return;
  }
  EXPECT_EQ(backend.status().code(), absl::StatusCode::kFailedPrecondition);
  const std::string message(backend.status().message());
  EXPECT_THAT(message, ::testing::HasSubstr("backend 'cuda'"));
  EXPECT_THAT(message, ::testing::HasSubstr("use 'cpu', or 'auto'"));
  EXPECT_EQ(cuda::MakeAsyncCudaBackend().status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_TRUE(MakeBackend("auto").ok()) << "auto falls back";
  EXPECT_THAT(WhyAutoIsNotCuda(), ::testing::AnyOf(::testing::HasSubstr("no GPU"), ::testing::HasSubstr("no CUDA")));
}

}  // namespace
}  // namespace gradwire::kernels
