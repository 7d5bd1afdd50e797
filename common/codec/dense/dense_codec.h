// The dense codecs: every element of every round. fp32 and bf16 are summed on a fixed grid of 2^-44, fixed32 and
// fixed16 as integers with one exponent per run; so sums are exact and independent of the order of arrival.
#pragma once

#include <memory>

#include "common/codec/family.h"

namespace gradwire {

std::unique_ptr<Codec> MakeDenseCodec(const CodecContext& context, const DenseSpec& spec);

namespace dense {
const CodecFamily& Family();
}

}  // namespace gradwire
