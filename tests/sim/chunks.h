// Frames of many chunks: what encoders write for buckets of megabytes, for the small ones of a simulation.
#pragma once

#include <cstddef>
#include <vector>

#include "common/base/bytes.h"
#include "common/wire/frame.h"

namespace gradwire::sim {

// The same frame in chunks of at most `chunk_bytes` (or one segment, where that is longer): at least 160. 0: as it is.
std::vector<Bytes> Rechunk(const std::vector<Bytes>& frame, size_t chunk_bytes);

// Of parsed chunks, as they came.
std::vector<Bytes> BytesOf(const std::vector<wire::Chunk>& chunks);

}  // namespace gradwire::sim
