// See log_format.h.
#include "server/log_format.h"

#include <spdlog/pattern_formatter.h>
#include <spdlog/sinks/stdout_color_sinks.h>
#include <spdlog/spdlog.h>

#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>

#include "common/base/names.h"

namespace gradwire {
namespace {

constexpr size_t kMaxEntryBytes = 16u << 10;

class EscapedText final : public spdlog::custom_flag_formatter {
 public:
  void format(const spdlog::details::log_msg& entry, const std::tm&, spdlog::memory_buf_t& out) override {
    const std::string text = Printable(std::string_view(entry.payload.data(), entry.payload.size()), kMaxEntryBytes);
    out.append(text.data(), text.data() + text.size());
  }
  std::unique_ptr<spdlog::custom_flag_formatter> clone() const override { return std::make_unique<EscapedText>(); }
};

}  // namespace

void SetLogFormat() {
  auto format = std::make_unique<spdlog::pattern_formatter>();
  format->add_flag<EscapedText>('*').set_pattern("[%Y-%m-%d %H:%M:%S.%e] [%^%l%$] %*");
  spdlog::set_formatter(std::move(format));
}

void LogToStandardError(const std::string& level) {
  static std::once_flag once;
  std::call_once(once, [] {
    spdlog::set_default_logger(spdlog::stderr_color_mt("gradwire"));
    SetLogFormat();
  });
  spdlog::set_level(spdlog::level::from_str(level));
}

}  // namespace gradwire
