// Codecs that send every element in a few bits (quantizer.h).
#pragma once

#include <memory>

#include "common/codec/family.h"

namespace gradwire::quantized {

const CodecFamily& Family();

std::unique_ptr<Codec> MakeQuantizedCodec(const CodecContext& context, const QuantizedSpec& spec);

}  // namespace gradwire::quantized
