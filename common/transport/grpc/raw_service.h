// A gRPC service whose methods take and give ByteBuffers, made from a protobuf service descriptor or a list: what the
// generated WithRawMethod_... templates do, for every method at once. Registered like a generated service, so gRPC
// answers unknown methods by itself.
#pragma once

#include <google/protobuf/descriptor.h>
#include <grpcpp/generic/async_generic_service.h>
#include <grpcpp/impl/rpc_service_method.h>
#include <grpcpp/impl/service_type.h>
#include <grpcpp/support/async_stream.h>
#include <grpcpp/support/async_unary_call.h>

#include <deque>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"

namespace gradwire::transport {

class RawService final : public ::grpc::Service {
 public:
  using Stream = ::grpc::ServerAsyncReaderWriter<::grpc::ByteBuffer, ::grpc::ByteBuffer>;
  using Unary = ::grpc::ServerAsyncResponseWriter<::grpc::ByteBuffer>;

  enum class Kind { kUnary, kServerStream, kStream };
  struct MethodSpec {
    std::string name;
    Kind kind;
  };

  RawService(std::string name, const std::vector<MethodSpec>& methods) : name_(std::move(name)) {
    for (const MethodSpec& method : methods) Add(method);
  }
  explicit RawService(const google::protobuf::ServiceDescriptor* descriptor) : name_(descriptor->full_name()) {
    for (int i = 0; i < descriptor->method_count(); ++i) {
      const auto* method = descriptor->method(i);
      const bool down = method->server_streaming();
      Add({method->name(), method->client_streaming() ? Kind::kStream : down ? Kind::kServerStream : Kind::kUnary});
    }
  }

  const std::string& name() const { return name_; }
  int method_count() const { return static_cast<int>(methods_.size()); }
  Kind kind(int index) const { return methods_[index].kind; }
  // As transport::Method names it: without the leading slash.
  std::string_view method(int index) const { return std::string_view(methods_[index].path).substr(1); }

  void RequestStream(int index, ::grpc::ServerContext* context, Stream* stream, ::grpc::ServerCompletionQueue* queue,
                     void* tag) {
    RequestAsyncBidiStreaming(index, context, stream, queue, queue, tag);
  }
  void RequestUnary(int index, ::grpc::ServerContext* context, ::grpc::ByteBuffer* request, Unary* unary,
                    ::grpc::ServerCompletionQueue* queue, void* tag) {
    RequestAsyncUnary(index, context, request, unary, queue, queue, tag);
  }

 private:
  struct MethodEntry {
    std::string path;
    Kind kind;
  };

  void Add(const MethodSpec& method) {
    using ::grpc::internal::RpcMethod;
    methods_.push_back({absl::StrCat("/", name_, "/", method.name), method.kind});
    AddMethod(new ::grpc::internal::RpcServiceMethod(  // owned by grpc::Service
        methods_.back().path.c_str(), method.kind == Kind::kUnary ? RpcMethod::NORMAL_RPC : RpcMethod::BIDI_STREAMING,
        nullptr));
    MarkMethodRaw(static_cast<int>(methods_.size()) - 1);
  }

  const std::string name_;
  std::deque<MethodEntry> methods_;  // a deque: gRPC keeps pointers to the paths
};

}  // namespace gradwire::transport
