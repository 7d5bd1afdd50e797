// What a refused join is told about its spec.
#include "server/job/spec_difference.h"

#include <gtest/gtest.h>

namespace gradwire {
namespace {

v1::JobSpec Spec() {
  v1::JobSpec spec;
  spec.set_codec("dense:values=fp32");
  v1::TensorSpec& tensor = *spec.add_tensors();
  tensor.set_name("w");
  tensor.add_shape(4);
  return spec;
}

TEST(DescribeDifference, NamesTheFieldAndBothValues) {
  v1::JobSpec asked = Spec();
  EXPECT_EQ(DescribeDifference(Spec(), asked), "nothing");
  asked.set_codec("tagc:density=0.01");
  EXPECT_EQ(DescribeDifference(Spec(), asked), "codec is \"dense:values=fp32\" here, \"tagc:density=0.01\" asked for");
  asked = Spec();
  asked.mutable_tensors(0)->set_shape(0, 5);
  EXPECT_EQ(DescribeDifference(Spec(), asked), "tensors[0].shape[0] is 4 here, 5 asked for");
  asked = Spec();
  asked.set_seed(9);
  EXPECT_EQ(DescribeDifference(Spec(), asked), "seed is unset here, 9 asked for");
}

TEST(DescribeDifference, CountsTensors) {
  v1::JobSpec asked = Spec();
  asked.add_tensors();
  EXPECT_EQ(DescribeDifference(Spec(), asked), "tensors: 1 here, 2 asked for");
}

}  // namespace
}  // namespace gradwire
