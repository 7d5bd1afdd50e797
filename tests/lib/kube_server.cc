// See kube_server.h.
#include "tests/lib/kube_server.h"

#include <sys/socket.h>
#include <unistd.h>

#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/ssl/context.hpp>
#include <boost/asio/ssl/stream.hpp>
#include <boost/beast/core/flat_buffer.hpp>
#include <boost/beast/http.hpp>
#include <cstdlib>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

namespace gradwire::testing_support {
namespace {

namespace asio = boost::asio;
namespace http = boost::beast::http;
using asio::ip::tcp;
using boost::system::error_code;
using nlohmann::json;

constexpr char kLeases[] = "/apis/coordination.k8s.io/v1/namespaces/default/leases";
constexpr unsigned kHttp11 = 11;

KubeServer::Reply Failure(unsigned code, const std::string& reason, const std::string& message) {
  return {code,
          {{"kind", "Status"},
           {"apiVersion", "v1"},
           {"status", "Failure"},
           {"reason", reason},
           {"code", code},
           {"message", message}}};
}

}  // namespace

TestCertificate::TestCertificate(const std::string& folder, const std::string& names)
    : certificate_file_(folder + "/certificate.pem"), key_file_(folder + "/key.pem") {
  // RSA: the real API server signs the tokens of service accounts with it too.
  const std::string command = absl::StrCat(
      "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=gradwire-tests -addext subjectAltName=", names,
      " -keyout '", key_file_, "' -out '", certificate_file_, "' 2>/dev/null");
  if (std::system(command.c_str()) != 0) std::abort();  // there is an openssl where there are ca-certificates
}

struct KubeServer::Tls {
  Tls() : context(asio::ssl::context::tls_server), acceptor(io, tcp::endpoint(asio::ip::address_v4::loopback(), 0)) {}
  asio::io_context io;
  asio::ssl::context context;
  tcp::acceptor acceptor;
};

KubeServer::KubeServer(const TestCertificate& certificate, std::string token)
    : tls_(std::make_unique<Tls>()), token_(std::move(token)) {
  tls_->context.use_certificate_chain_file(certificate.certificate_file());
  tls_->context.use_private_key_file(certificate.key_file(), asio::ssl::context::pem);
  port_ = tls_->acceptor.local_endpoint().port();
  acceptor_ = std::thread([this] { Accept(); });
}

KubeServer::~KubeServer() {
  std::vector<std::thread> threads;
  {
    absl::MutexLock lock(&mu_);
    stop_ = true;
    for (const int fd : open_) shutdown(fd, SHUT_RDWR);
  }
  shutdown(tls_->acceptor.native_handle(), SHUT_RDWR);
  acceptor_.join();
  {
    absl::MutexLock lock(&mu_);
    threads.swap(threads_);
  }
  for (std::thread& thread : threads) thread.join();
}

void KubeServer::Accept() {
  for (;;) {
    const int fd = accept(tls_->acceptor.native_handle(), nullptr, nullptr);
    absl::MutexLock lock(&mu_);
    if (fd < 0 || stop_) {
      if (fd >= 0) close(fd);
      return;
    }
    open_.insert(fd);
    threads_.emplace_back([this, fd] { Serve(fd); });
  }
}

void KubeServer::Serve(int fd) {
  {
    asio::io_context io;
    asio::ssl::stream<tcp::socket> stream(io, tls_->context);
    error_code error;
    stream.next_layer().assign(tcp::v4(), fd, error);
    stream.handshake(asio::ssl::stream_base::server, error);
    boost::beast::flat_buffer buffer;
    http::request<http::string_body> request;
    if (!error) http::read(stream, buffer, request, error);
    Reply reply{.silent = true};
    if (!error) {
      absl::MutexLock lock(&mu_);
      ++requests_;
      const std::string method(request.method_string());
      std::deque<Reply>& next = next_[method];
      const bool answers = next.empty() || next.front().lost;
      if (answers) {
        reply = Answer(method, std::string(request.target()), std::string(request[http::field::authorization]),
                       request.body());
      }
      if (!next.empty()) {
        if (answers) {
          reply.lost = true;
        } else {
          reply = std::move(next.front());
        }
        next.pop_front();
      }
    }
    if (reply.raw) {
      asio::write(stream, asio::buffer(reply.text), error);
    } else if (!reply.silent && !reply.lost) {
      http::response<http::string_body> response(static_cast<http::status>(reply.status), kHttp11);
      response.set(http::field::content_type, "application/json");
      for (const auto& [name, value] : reply.headers) response.set(name, value);
      response.body() = reply.text.empty() ? reply.body.dump() : reply.text;
      response.prepare_payload();
      http::write(stream, response, error);
    }
    char rest = 0;
    while (reply.silent && !error) stream.next_layer().read_some(asio::buffer(&rest, 1), error);
    absl::MutexLock lock(&mu_);
    open_.erase(fd);
  }
}

KubeServer::Reply KubeServer::Answer(const std::string& method, const std::string& target,
                                     const std::string& authorization, const std::string& body) {
  if (authorization != "Bearer " + token_) return Failure(401, "Unauthorized", "Unauthorized");
  if (forbidden_) return Failure(403, "Forbidden", "leases.coordination.k8s.io is forbidden: no such right");
  const std::string folder = std::string(kLeases) + "/";
  if (method == "POST" && target == kLeases) return Write("", body);
  if (!target.starts_with(folder)) {
    return Failure(404, "NotFound", method == "POST" ? "namespaces not found" : "leases not found");
  }
  const std::string name = target.substr(folder.size());
  if (method == "PUT") return Write(name, body);
  const auto it = leases_.find(name);
  if (it == leases_.end()) return Failure(404, "NotFound", "leases \"" + name + "\" not found");
  return {200, it->second};
}

KubeServer::Reply KubeServer::Write(const std::string& old, const std::string& body) {
  json object = json::parse(body, nullptr, false);
  if (!object.is_object() || object.value("kind", "") != "Lease" || !object["metadata"].is_object()) {
    return Failure(400, "BadRequest", "this is no Lease");
  }
  json& metadata = object["metadata"];
  const std::string name = metadata.value("name", "");
  const std::string version = metadata.value("resourceVersion", "");
  const json& spec = object["spec"];
  const bool valid = !name.empty() && (old.empty() ? version.empty() : name == old && !version.empty()) &&
                     spec.value("leaseDurationSeconds", 1) > 0 && spec.value("leaseTransitions", 0) >= 0;
  if (!valid) return Failure(422, "Invalid", "Lease \"" + name + "\" is invalid");
  const auto it = leases_.find(name);
  if (old.empty() && it != leases_.end())
    return Failure(409, "AlreadyExists", "leases \"" + name + "\" already exists");
  if (!old.empty() && it == leases_.end()) return Failure(404, "NotFound", "leases \"" + name + "\" not found");
  if (!old.empty() && it->second["metadata"]["resourceVersion"] != version) {
    return Failure(409, "Conflict", "the object has been modified; please apply your changes to the latest version");
  }
  metadata["resourceVersion"] = absl::StrCat(++version_);
  metadata["namespace"] = "default";
  leases_[name] = object;
  return {old.empty() ? 201u : 200u, std::move(object)};
}

void KubeServer::Next(const std::string& method, Reply reply) {
  absl::MutexLock lock(&mu_);
  next_[method].push_back(std::move(reply));
}

void KubeServer::SetToken(const std::string& token) {
  absl::MutexLock lock(&mu_);
  token_ = token;
}

void KubeServer::SetForbidden(bool forbidden) {
  absl::MutexLock lock(&mu_);
  forbidden_ = forbidden;
}

json KubeServer::Get(const std::string& name) const {
  absl::MutexLock lock(&mu_);
  const auto it = leases_.find(name);
  return it == leases_.end() ? json() : it->second;
}

void KubeServer::Edit(const std::string& name, const json& patch) {
  absl::MutexLock lock(&mu_);
  json& object = leases_[name];
  object.merge_patch(patch);
  object["metadata"]["resourceVersion"] = absl::StrCat(++version_);
}

void KubeServer::Remove(const std::string& name) {
  absl::MutexLock lock(&mu_);
  leases_.erase(name);
}

int KubeServer::requests() const {
  absl::MutexLock lock(&mu_);
  return requests_;
}

}  // namespace gradwire::testing_support
