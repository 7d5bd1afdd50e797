// See https_client.h.
#include "server/lease/https_client.h"

#include <openssl/x509v3.h>

#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/ssl/context.hpp>
#include <boost/beast/core/flat_buffer.hpp>
#include <boost/beast/core/tcp_stream.hpp>
#include <boost/beast/http.hpp>
#include <boost/beast/ssl/ssl_stream.hpp>
#include <chrono>
#include <exception>
#include <optional>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "common/base/status_macros.h"

namespace gradwire {
namespace {

namespace asio = boost::asio;
namespace beast = boost::beast;
namespace http = beast::http;
namespace ssl = asio::ssl;
using boost::system::error_code;
using Deadline = std::chrono::steady_clock::time_point;

constexpr unsigned kHttp11 = 11;

// What came is no HTTP, or more of it than we take.
bool IsMalformed(const error_code& error) {
  return error.category() == make_error_code(http::error::bad_version).category() &&
         error != http::error::end_of_stream && error != http::error::partial_message;
}

// One connection and the request on it, step by step, each until `deadline` at most.
class Exchange {
 public:
  Exchange(std::string where, Deadline deadline)
      : where_(std::move(where)), deadline_(deadline), tls_(ssl::context::tls_client) {}

  absl::Status Trust(const std::string& ca_file, const std::string& host) {
    error_code error;
    tls_.set_options(ssl::context::default_workarounds | ssl::context::no_tlsv1 | ssl::context::no_tlsv1_1, error);
    if (!error) tls_.load_verify_file(ca_file, error);
    if (error) {
      return absl::FailedPreconditionError(
          absl::StrCat("the certificates in '", ca_file, "' cannot be used: ", error.message()));
    }
    stream_.emplace(context_, tls_);
    SSL* const handle = stream_->native_handle();
    SSL_set_verify(handle, SSL_VERIFY_PEER, nullptr);
    X509_VERIFY_PARAM* const expected = SSL_get0_param(handle);
    error_code no_number;
    asio::ip::make_address(host, no_number);
    const bool set = no_number ? X509_VERIFY_PARAM_set1_host(expected, host.data(), host.size()) == 1 &&
                                     SSL_set_tlsext_host_name(handle, host.c_str()) == 1
                               : X509_VERIFY_PARAM_set1_ip_asc(expected, host.c_str()) == 1;
    return set ? absl::OkStatus() : absl::FailedPreconditionError(absl::StrCat("'", host, "' is no host"));
  }

  absl::Status Connect(const std::string& host, uint16_t port) {
    asio::ip::tcp::resolver resolver(context_);
    std::vector<asio::ip::tcp::endpoint> endpoints;
    error_code no_number;
    const asio::ip::address number = asio::ip::make_address(host, no_number);
    if (no_number) {
      asio::ip::tcp::resolver::results_type found;
      GW_RETURN_IF_ERROR(Await("look-up", [&](auto done) {
        resolver.async_resolve(host, std::to_string(port), [&found, done](const error_code& error, auto results) {
          found = std::move(results);
          done(error);
        });
      }));
      for (const auto& entry : found) endpoints.push_back(entry.endpoint());
    } else {
      endpoints.emplace_back(number, port);
    }
    GW_RETURN_IF_ERROR(Await("connection", [&](auto done) {
      beast::get_lowest_layer(*stream_).async_connect(
          endpoints, [done](const error_code& error, const asio::ip::tcp::endpoint&) { done(error); });
    }));
    const absl::Status greeted =
        Await("TLS handshake", [&](auto done) { stream_->async_handshake(ssl::stream_base::client, done); });
    const long verified = SSL_get_verify_result(stream_->native_handle());
    if (greeted.ok() || verified == X509_V_OK) return greeted;
    return absl::UnavailableError(
        absl::StrCat(where_, " is not trusted: ", X509_verify_cert_error_string(verified),
                     "; the CA file must be that of the server, and its certificate must name this address"));
  }

  absl::StatusOr<HttpsReply> Send(const http::request<http::string_body>& request) {
    GW_RETURN_IF_ERROR(Await("request", [&](auto done) {
      http::async_write(*stream_, request, [done](const error_code& error, size_t) { done(error); });
    }));
    beast::flat_buffer buffer;
    http::response_parser<http::string_body> parser;
    parser.body_limit(HttpsClient::kMaxBodyBytes);
    parser.header_limit(HttpsClient::kMaxHeaderBytes);
    GW_RETURN_IF_ERROR(Await("answer", [&](auto done) {
      http::async_read_header(*stream_, buffer, parser, [done](const error_code& error, size_t) { done(error); });
    }));
    // Before the body begins: memory for all that it promises would be taken at once, whatever its limit.
    const auto promised = parser.content_length();
    if (promised && *promised > HttpsClient::kMaxBodyBytes) {
      return absl::DataLossError(absl::StrCat(where_, ": an answer of ", *promised, " bytes; at most ",
                                              HttpsClient::kMaxBodyBytes, " are read"));
    }
    GW_RETURN_IF_ERROR(Await("answer", [&](auto done) {
      http::async_read(*stream_, buffer, parser, [done](const error_code& error, size_t) { done(error); });
    }));
    HttpsReply reply;
    reply.status = parser.get().result_int();
    const auto wait = parser.get()[http::field::retry_after];
    if (!absl::SimpleAtoi(absl::string_view(wait.data(), wait.size()), &reply.retry_after_s)) reply.retry_after_s = 0;
    reply.body = std::move(parser.get().body());
    return reply;
  }

 private:
  // Starts an operation, which calls done(error) at its end, and waits for that.
  template <typename Start>
  absl::Status Await(const char* what, Start start) {
    std::optional<error_code> ended;
    start([&ended](const error_code& error) { ended = error; });
    context_.restart();
    while (!ended && context_.run_one_until(deadline_) > 0) {
    }
    if (!ended) {
      beast::get_lowest_layer(*stream_).close();
      context_.stop();
      return absl::DeadlineExceededError(absl::StrCat(where_, " does not answer (", what, ")"));
    }
    if (!*ended) return absl::OkStatus();
    const std::string said = absl::StrCat(where_, ": ", what, ": ", ended->message());
    return IsMalformed(*ended) ? absl::DataLossError(said) : absl::UnavailableError(said);
  }

  const std::string where_;
  const Deadline deadline_;
  asio::io_context context_;
  ssl::context tls_;
  std::optional<beast::ssl_stream<beast::tcp_stream>> stream_;
};

}  // namespace

HttpsClient::HttpsClient(std::string host, uint16_t port, std::string ca_file)
    : host_(std::move(host)), port_(port), ca_file_(std::move(ca_file)) {}

absl::StatusOr<HttpsReply> HttpsClient::Call(const HttpsRequest& request, int64_t timeout_ms) const {
  http::request<http::string_body> message;
  const bool six = host_.find(':') != std::string::npos;
  const std::string authority = absl::StrCat(six ? "[" : "", host_, six ? "]:" : ":", port_);
  const std::string where = "https://" + authority;
  try {  // the edge of Boost, which reports some of its errors by exceptions
    message.version(kHttp11);
    message.method_string(request.method);
    message.target(request.target);
    message.set(http::field::host, authority);
    message.set(http::field::user_agent, "gradwire-server");
    message.set(http::field::accept, "application/json");
    message.set(http::field::connection, "close");
    message.set(http::field::authorization, absl::StrCat("Bearer ", request.bearer));
    if (!request.body.empty()) {
      message.set(http::field::content_type, "application/json");
      message.body() = request.body;
    }
    message.prepare_payload();
    Exchange exchange(where, std::chrono::steady_clock::now() + std::chrono::milliseconds(timeout_ms));
    GW_RETURN_IF_ERROR(exchange.Trust(ca_file_, host_));
    GW_RETURN_IF_ERROR(exchange.Connect(host_, port_));
    return exchange.Send(message);
  } catch (const std::exception& error) {
    return absl::UnavailableError(absl::StrCat(where, ": ", error.what()));
  }
}

}  // namespace gradwire
