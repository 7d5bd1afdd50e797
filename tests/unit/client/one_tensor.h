// One tensor on one shard, in one bucket: what a worker needs to send frames of it.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "client/cpp/internal/gradients.h"
#include "common/job/job.h"
#include "common/job/layout.h"
#include "kernels/backend.h"

namespace gradwire::client {

class OneTensorTest : public ::testing::Test {
 protected:
  static v1::JobSpec Spec(uint64_t elements, const std::string& codec) {
    v1::JobSpec spec;
    spec.set_name("unit");
    spec.add_tensors()->set_name("weight");
    spec.mutable_tensors(0)->add_shape(elements);
    spec.mutable_optimizer()->set_kind(v1::OPTIMIZER_SGD);
    spec.set_codec(codec);
    return spec;
  }
  void Make(const v1::JobSpec& spec) {
    absl::StatusOr<Job> job = Job::Make(spec);
    ASSERT_TRUE(job.ok()) << job.status();
    job_ = std::make_unique<Job>(*std::move(job));
    absl::StatusOr<Layout> layout = Layout::Make(*job_, 1);
    ASSERT_TRUE(layout.ok()) << layout.status();
    layout_ = std::make_unique<Layout>(*std::move(layout));
    ASSERT_EQ(layout_->bucket_count(), 1u);
    backend_ = *kernels::MakeBackend("cpu");
    auto codec = MakeCodec({job_.get(), &slice(), backend_.get()});
    ASSERT_TRUE(codec.ok()) << codec.status();
    codec_ = *std::move(codec);
    encoder_ = codec_->NewEncoder();
    store_ = std::make_unique<GradientStore>(job_.get(), std::vector<const Codec*>{codec_.get()},
                                             MakeHostMemory(backend_.get()));
  }
  const BucketLayout& slice() const { return layout_->at(0, 0); }

  std::unique_ptr<Job> job_;
  std::unique_ptr<Layout> layout_;
  std::unique_ptr<kernels::Backend> backend_;
  std::unique_ptr<Codec> codec_;
  std::unique_ptr<Encoder> encoder_;
  std::unique_ptr<GradientStore> store_;
};

}  // namespace gradwire::client
