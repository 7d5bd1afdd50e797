// Buckets of every codec with a few real rounds of two workers: what frame targets decode against and begin with.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "common/codec/codec.h"
#include "tests/conformance/codec/codec_harness.h"

namespace gradwire::fuzz {

struct Round {
  uint64_t round = 0;
  RoundPlan plan;
  std::vector<EncodedFrame> frames;  // one per worker
  std::vector<Bytes> update;
  RoundPlan next;
};

struct Bucket {
  std::unique_ptr<testing::Cluster> cluster;
  std::vector<Round> rounds;  // from 0 on
};

inline constexpr uint32_t kWorkers = 2;
inline constexpr float kLearningRate = 0.5f;

// Made once and never changed. 300 elements in runs of 64 each; one bucket is an empty share.
const std::vector<Bucket>& Buckets();
// Those that an input names.
const Bucket& BucketOf(uint8_t bucket);
const Round& RoundOf(const Bucket& bucket, uint8_t round);
// How many a byte of the input tells apart.
uint8_t BucketCount();
uint8_t RoundCount(const Bucket& bucket);

FrameIdentity IdentityOf(const Bucket& bucket, uint64_t round, uint64_t incarnation);

// Encodes a frame of the next round by `plan`, as a worker would whose memory holds every magnitude from tiny to large.
absl::StatusOr<EncodedFrame> EncodeBy(const Bucket& bucket, uint64_t round, const RoundPlan& plan);
// Of this round, by a worker all of whose elements are `value`.
absl::StatusOr<EncodedFrame> EncodeValue(const Bucket& bucket, const Round& round, float value);

}  // namespace gradwire::fuzz
