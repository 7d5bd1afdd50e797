// Codecs that send every element in a few bits (quantizer.h).
#pragma once

#include <memory>

#include "common/codec/codec.h"

namespace gradwire::quantized {

std::unique_ptr<Codec> MakeQuantizedCodec(const CodecContext& context, const QuantizedSpec& spec);

}  // namespace gradwire::quantized
