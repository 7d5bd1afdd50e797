// PowerSGD (Vogels et al. 2019, arXiv 1905.13727): each matrix by two thin factors, in two rounds. In the first each
// worker sends P = M Q, and the shard makes the mean of these orthonormal; in the second each sends Q = M^T P, and
// everyone applies P Q^T with the mean of these, from which the next step starts. Factors of a round are the plan of
// the next one.
#pragma once

#include <memory>

#include "common/codec/family.h"

namespace gradwire::powersgd {

const CodecFamily& Family();

std::unique_ptr<Codec> MakePowerSgdCodec(const CodecContext& context);

}  // namespace gradwire::powersgd
