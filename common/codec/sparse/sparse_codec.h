// Codecs that send a part of the elements as positions and values: top-k, hard threshold, random-k.
#pragma once

#include <memory>

#include "common/codec/family.h"

namespace gradwire::sparse {

const CodecFamily& Family();

std::unique_ptr<Codec> MakeSparseCodec(const CodecContext& context, const SparseSpec& spec);

}  // namespace gradwire::sparse
