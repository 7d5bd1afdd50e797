// The gRPC message cursor: control bytes and frame of a message that arrived in any slices.
#include <google/protobuf/stubs/logging.h>
#include <grpcpp/support/slice.h>

#include <algorithm>

#include "common/transport/grpc/message_codec.h"
#include "gradwire/v1/worker.pb.h"
#include "tests/fuzz/chunk_input.h"
#include "tests/fuzz/targets.h"

namespace gradwire::fuzz {
namespace {

std::vector<uint8_t> FrameOf(const transport::Message& message) {
  std::vector<uint8_t> frame;
  for (const Bytes& bytes : message.frame) frame.insert(frame.end(), bytes.data(), bytes.data() + bytes.size());
  return frame;
}

::grpc::ByteBuffer BufferOf(Input bytes, uint8_t slicing) {
  std::vector<::grpc::Slice> slices;
  for (const Bytes& slice : Slices(bytes, slicing)) slices.emplace_back(slice.data(), slice.size());
  return ::grpc::ByteBuffer(slices.data(), slices.size());
}

}  // namespace

// u8 slicing, message.
void RunMessage(Input input) {
  Reader reader(input);
  const uint8_t slicing = reader.Take<uint8_t>();
  const Input bytes = reader.rest();
  const absl::StatusOr<transport::Message> whole = transport::DecodeMessage(BufferOf(bytes, 0));
  const absl::StatusOr<transport::Message> sliced = transport::DecodeMessage(BufferOf(bytes, slicing));
  Require(whole.status() == sliced.status(), "slices do not change the verdict");
  if (!whole.ok()) return;
  const std::vector<uint8_t> frame = FrameOf(*whole);
  Require(whole->control == sliced->control && frame == FrameOf(*sliced), "slices do not change the message");
  Require(std::ranges::equal(Input(reinterpret_cast<const uint8_t*>(whole->control.data()), whole->control.size()),
                             bytes.first(whole->control.size())) &&
              std::ranges::equal(frame, bytes.last(frame.size())),
          "control bytes are the front of the message, the frame is its end");
  const google::protobuf::LogSilencer silent;
  v1::PushMessage control;
  (void)control.ParseFromString(whole->control);
  const absl::StatusOr<transport::Message> again = transport::DecodeMessage(transport::EncodeMessage(*whole));
  Require(again.ok() && again->control == whole->control && FrameOf(*again) == frame, "decode(encode(x)) == x");
}

Seeds MessageSeeds() {
  Seeds seeds;
  for (size_t frame_bytes : {0, 1, 100, 5000}) {
    v1::PushMessage control;
    control.mutable_open();
    transport::Message message;
    message.control = control.SerializeAsString();
    if (frame_bytes != 0) message.frame.push_back(Bytes::FromVector(std::vector<uint8_t>(frame_bytes, 9)));
    const std::string bytes = transport::ToString(transport::EncodeMessage(std::move(message)));
    seeds.push_back({static_cast<uint8_t>(frame_bytes % 7)});
    seeds.back().insert(seeds.back().end(), bytes.begin(), bytes.end());
  }
  return seeds;
}

}  // namespace gradwire::fuzz
