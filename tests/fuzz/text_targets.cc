// What people write: files of settings, codec specs, addresses.
#include <google/protobuf/text_format.h>

#include <memory>
#include <string>
#include <utility>

#include "common/config/message_file.h"
#include "common/job/codec_spec.h"
#include "common/transport/address.h"
#include "gradwire/v1/job.pb.h"
#include "gradwire/v1/server_config.pb.h"
#include "tests/fuzz/targets.h"

namespace gradwire::fuzz {
namespace {

std::string_view TextOf(Input input) { return {reinterpret_cast<const char*>(input.data()), input.size()}; }

std::vector<uint8_t> SeedOf(std::string_view text) { return {text.begin(), text.end()}; }

}  // namespace

// u8 kind (bit 0: YAML, bit 1: the server's settings instead of a job), text.
void RunConfig(Input input) {
  Reader reader(input);
  const uint8_t kind = reader.Take<uint8_t>();
  const MessageFormat format = (kind & 1) != 0 ? MessageFormat::kYaml : MessageFormat::kText;
  std::unique_ptr<google::protobuf::Message> message;
  if ((kind & 2) != 0) {
    message = std::make_unique<v1::ServerConfig>();
  } else {
    message = std::make_unique<v1::JobSpec>();
  }
  const absl::Status status = ParseMessageText(TextOf(reader.rest()), "file", format, message.get());
  if (!status.ok()) {
    Require(status.code() == absl::StatusCode::kInvalidArgument, "a bad file is an invalid argument");
    return;
  }
  std::string printed;
  Require(google::protobuf::TextFormat::PrintToString(*message, &printed), "a message can be printed");
  const std::unique_ptr<google::protobuf::Message> again(message->New());
  Require(ParseMessageText(printed, "printed", MessageFormat::kText, again.get()).ok(), "what is printed is a file");
}

Seeds ConfigSeeds() {
  constexpr std::pair<uint8_t, std::string_view> kFiles[] = {
      {1,
       "name: gpt\ntensors:\n  - {name: a.weight, shape: [50, 40], role: ROLE_HEAD}\n  - name: b\n    shape: 40\n"
       "optimizer:\n  kind: OPTIMIZER_SGD\n  groups: [{momentum: 0.9, nesterov: true}]\nseed: 18446744073709551615\n"},
      {1, "optimizer: {kind: OPTIMIZER_SGD, groups: [&g {momentum: 0.5}, *g, *g]}\nname: \"q\\x41\\u00e9\"\n"},
      {1, "{\"name\": \"gpt\", \"rules\": [{\"pattern\": \"*.bias\", \"codec\": \"dense:fp32\"}]}"},
      {3, "listen: [\"grpc://0.0.0.0:7070\", 'unix:///tmp/s']\nbackend: cpu\ndrain_ms: 500\nmax_jobs: 3 # three\n"},
      {3, "listen: |\n  block\n  text\nlog_level: >-\n  folded\n"},
      {0,
       "name: \"gpt\" tensors { name: \"a\" shape: [50, 40] role: ROLE_HEAD } seed: 0x10 codec: 'tagc' optimizer "
       "{ kind: OPTIMIZER_SGD groups { momentum: 0.9 nesterov: true weight_decay: 1e-2 } }"},
      {2, "listen: \"grpc://[::1]:1\" memory_limit_bytes: 1000000 backend: \"cpu\"\n# comment\nmax_jobs: 3"},
  };
  Seeds seeds;
  for (const auto& [kind, text] : kFiles) {
    seeds.push_back(SeedOf(text));
    seeds.back().insert(seeds.back().begin(), kind);
  }
  return seeds;
}

void RunCodecSpec(Input input) {
  const absl::StatusOr<CodecSpec> spec = ParseCodecSpec(TextOf(input));
  if (!spec.ok()) return;
  const absl::StatusOr<CodecSpec> again = ParseCodecSpec(ToString(*spec));
  Require(again.ok() && *again == *spec, "a codec spec that is printed and parsed stays what it is");
  const auto* tagc = std::get_if<TagcSpec>(&*spec);
  const auto* sparse = std::get_if<SparseSpec>(&*spec);
  for (uint64_t round : {uint64_t{0}, uint64_t{1}, uint64_t{2}, uint64_t{1000}, UINT64_MAX}) {
    const double density = tagc != nullptr ? tagc->DensityAt(round) : sparse != nullptr ? sparse->DensityAt(round) : 1;
    Require(density >= 0 && density <= 1, "a density lies in [0, 1]");
  }
}

Seeds CodecSpecSeeds() {
  Seeds seeds;
  for (std::string_view text :
       {"dense", "dense:fp32", "dense:values=fixed16", "tagc", "tagc:density=0.05,bits=9,cells=16,form=list",
        "tagc:density=1e-06,cells=auto,warmup_rounds=100,warmup_density=0.25,slack=1.125", "signum:momentum=0.5",
        "terngrad:clip=2.5", "natural:bits=3,norm=l2", "topk:density=0.001,values=int4,warmup_rounds=9",
        "threshold:value=0.5,values=int6", "union:values=int4", "randomk:values=bf16",
        "dgc:momentum=0.5,nesterov=true,clip=2", "uniform:rounding=stochastic", "thc:bits=2,granularity=20,p=0.1",
        "zen", "zen:index=auto,values=fp16,run=64", "adaptive:run=4"}) {
    seeds.push_back(SeedOf(text));
  }
  return seeds;
}

void RunAddress(Input input) {
  const absl::StatusOr<transport::Address> address = transport::ParseAddress(TextOf(input));
  if (!address.ok()) return;
  const absl::StatusOr<transport::Address> again = transport::ParseAddress(address->ToString());
  Require(again.ok() && again->scheme == address->scheme && again->host == address->host &&
              again->port == address->port && again->name == address->name,
          "an address that is printed and parsed stays what it is");
}

Seeds AddressSeeds() {
  Seeds seeds;
  for (std::string_view text : {"grpc://localhost:7070", "grpc://[::1]:0", "grpc://10.0.0.1:65535",
                                "unix:///run/gradwire.sock", "inproc://name"}) {
    seeds.push_back(SeedOf(text));
  }
  return seeds;
}

}  // namespace gradwire::fuzz
