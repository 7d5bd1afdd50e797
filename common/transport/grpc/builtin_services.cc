// See builtin_services.h. Both protocols are a handful of fields, read and written with protobuf's coded streams.
#include "common/transport/grpc/builtin_services.h"

#include <google/protobuf/descriptor.pb.h>
#include <google/protobuf/io/coded_stream.h>
#include <google/protobuf/io/zero_copy_stream_impl_lite.h>

#include <algorithm>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/transport/sink_scope.h"

namespace gradwire::transport {
namespace {

using google::protobuf::FileDescriptor;
using google::protobuf::io::CodedInputStream;
using google::protobuf::io::CodedOutputStream;
using google::protobuf::io::StringOutputStream;

constexpr uint32_t kServing = 1;
constexpr uint32_t kNotServing = 2;
constexpr uint32_t kServiceUnknown = 3;

void PutBytes(std::string* out, uint32_t field, std::string_view bytes) {
  StringOutputStream raw(out);
  CodedOutputStream coded(&raw);
  coded.WriteTag(field << 3 | 2);
  coded.WriteVarint32(static_cast<uint32_t>(bytes.size()));
  coded.WriteRaw(bytes.data(), static_cast<int>(bytes.size()));
}

void PutVarint(std::string* out, uint32_t field, uint32_t value) {
  StringOutputStream raw(out);
  CodedOutputStream coded(&raw);
  coded.WriteTag(field << 3);
  coded.WriteVarint32(value);
}

// The length-delimited fields of a message, by number; the last one of a number counts. False when malformed.
bool ReadFields(std::string_view message, std::map<uint32_t, std::string>* fields) {
  CodedInputStream in(reinterpret_cast<const uint8_t*>(message.data()), static_cast<int>(message.size()));
  while (const uint32_t tag = in.ReadTag()) {
    uint32_t length = 0;
    if ((tag & 7) != 2 || !in.ReadVarint32(&length) || length > message.size()) return false;
    if (!in.ReadString(&(*fields)[tag >> 3], static_cast<int>(length))) return false;
  }
  return in.ConsumedEntireMessage();
}

std::string HealthReply(uint32_t status) {
  std::string reply;
  PutVarint(&reply, 1, status);
  return reply;
}

// ---- Reflection ----

void AddFile(const FileDescriptor* file, std::set<const FileDescriptor*>* seen, std::string* out) {
  if (!seen->insert(file).second) return;
  google::protobuf::FileDescriptorProto proto;
  file->CopyTo(&proto);
  PutBytes(out, 1, proto.SerializeAsString());
  for (int i = 0; i < file->dependency_count(); ++i) AddFile(file->dependency(i), seen, out);
}

std::string ReflectionReply(std::string_view request, const std::vector<std::string>& services) {
  std::string reply;
  std::map<uint32_t, std::string> fields;
  const bool parsed = ReadFields(request, &fields);
  PutBytes(&reply, 1, fields[1]);
  PutBytes(&reply, 2, request);
  const auto* pool = google::protobuf::DescriptorPool::generated_pool();
  const FileDescriptor* file = nullptr;
  if (fields.contains(3)) file = pool->FindFileByName(fields[3]);
  if (fields.contains(4)) file = pool->FindFileContainingSymbol(fields[4]);
  std::string body;
  if (parsed && fields.contains(7)) {
    for (const std::string& name : services) {
      std::string service;
      PutBytes(&service, 1, name);
      PutBytes(&body, 1, service);
    }
    PutBytes(&reply, 6, body);
  } else if (parsed && file != nullptr) {
    std::set<const FileDescriptor*> seen;
    AddFile(file, &seen, &body);
    PutBytes(&reply, 4, body);
  } else {
    const bool lookup = fields.contains(3) || fields.contains(4);
    PutVarint(&body, 1, static_cast<uint32_t>(lookup ? absl::StatusCode::kNotFound : absl::StatusCode::kUnimplemented));
    PutBytes(&body, 2, lookup ? "no such file or symbol" : "files, symbols and the list of services can be asked for");
    PutBytes(&reply, 7, body);
  }
  return reply;
}

class ReflectionSink final : public StreamSink {
 public:
  ReflectionSink(std::shared_ptr<Stream> stream, std::vector<std::string> services)
      : stream_(std::move(stream)), services_(std::move(services)) {}
  void OnMessage(Message message) override {
    (void)stream_->Send(Message{ReflectionReply(message.control, services_), {}});
  }
  void OnClosed(absl::Status) override {}

 private:
  const std::shared_ptr<Stream> stream_;
  const std::vector<std::string> services_;
};

}  // namespace

// ---- Health ----

// Lives until OnClosed, which takes it off the list of watchers.
class WatchSink final : public StreamSink {
 public:
  WatchSink(BuiltinServices* owner, std::shared_ptr<Stream> stream) : owner_(owner), stream_(std::move(stream)) {}
  void OnMessage(Message message) override {
    std::map<uint32_t, std::string> fields;
    if (!ReadFields(message.control, &fields)) return stream_->Finish(absl::InvalidArgumentError("malformed request"));
    owner_->AddWatcher(this, stream_, fields[1]);
  }
  void OnClosed(absl::Status) override { owner_->RemoveWatcher(this); }

 private:
  BuiltinServices* const owner_;
  const std::shared_ptr<Stream> stream_;
};

bool BuiltinServices::Knows(const std::string& service) const {
  return service.empty() || std::find(services_.begin(), services_.end(), service) != services_.end();
}

void BuiltinServices::SetServing(bool serving) {
  std::vector<std::shared_ptr<Stream>> watchers;
  {
    absl::MutexLock lock(&mu_);
    if (serving_ == serving) return;
    serving_ = serving;
    for (const auto& [key, stream] : watchers_) watchers.push_back(stream);
  }
  const SinkScope never_block(this);  // a watcher that does not read holds up nobody
  for (const auto& stream : watchers) (void)stream->Send(Message{HealthReply(serving ? kServing : kNotServing), {}});
}

void BuiltinServices::AddWatcher(StreamSink* key, std::shared_ptr<Stream> stream, const std::string& service) {
  uint32_t status = kServiceUnknown;
  if (Knows(service)) {
    absl::MutexLock lock(&mu_);
    watchers_.emplace(key, stream);
    status = serving_ ? kServing : kNotServing;
  }
  (void)stream->Send(Message{HealthReply(status), {}});
}

void BuiltinServices::RemoveWatcher(StreamSink* key) {
  absl::MutexLock lock(&mu_);
  watchers_.erase(key);
}

absl::StatusOr<std::string> BuiltinServices::Call(Method method, std::string_view request) {
  std::map<uint32_t, std::string> fields;
  if (!ReadFields(request, &fields)) return absl::InvalidArgumentError("malformed health request");
  if (!Knows(fields[1])) return absl::NotFoundError(absl::StrCat("no service \"", fields[1], "\" here"));
  absl::MutexLock lock(&mu_);
  return HealthReply(serving_ ? kServing : kNotServing);
}

absl::StatusOr<std::unique_ptr<StreamSink>> BuiltinServices::Accept(Method method, std::shared_ptr<Stream> stream) {
  if (method.starts_with(kHealthName)) return std::make_unique<WatchSink>(this, std::move(stream));
  std::vector<std::string> names = services_;
  names.insert(names.end(), {kHealthName, kReflectionName, kReflectionAlphaName});
  return std::make_unique<ReflectionSink>(std::move(stream), std::move(names));
}

}  // namespace gradwire::transport
