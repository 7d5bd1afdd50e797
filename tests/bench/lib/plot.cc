// See plot.h.
#include "tests/bench/lib/plot.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <limits>
#include <string>
#include <vector>

namespace gradwire::bench {
namespace {

constexpr double kLeft = 80, kTop = 40, kWidth = 560, kHeight = 360;
constexpr double kLegendLine = 20, kLegendMark = 42, kCharacter = 7;  // of the legend, at most
constexpr std::array kColours = {"#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#8c564b", "#17becf"};

std::string Escaped(const std::string& text) {
  std::string out;
  for (const char c : text) out += c == '<' ? "&lt;" : c == '>' ? "&gt;" : c == '&' ? "&amp;" : std::string(1, c);
  return out;
}

// From values to pixels.
struct Axis {
  double low = std::numeric_limits<double>::infinity();
  double high = 0;
  void Include(double value) {
    low = std::min(low, value);
    high = std::max(high, value);
  }
  // 0 at `low`, 1 at `high`.
  double At(double value) const { return high > low ? std::log(value / low) / std::log(high / low) : 0.5; }
};

std::string Number(double value) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.4g", value);
  return text;
}

}  // namespace

bool Plot::Write(const std::string& path) const {
  if (path.empty()) return true;
  Axis x, y;
  std::vector<std::string> names;  // of the legend
  size_t longest = 0;
  for (const Line& line : lines_) {
    for (const auto& [px, py] : line.points) {
      x.Include(px);
      y.Include(py);
    }
    if (std::find(names.begin(), names.end(), line.name) == names.end()) names.push_back(line.name);
    longest = std::max(longest, line.name.size());
  }
  const double width = kLeft + kWidth + kLegendMark + kCharacter * static_cast<double>(longest) + 10;
  const double height = kTop + std::max(kHeight, kLegendLine * static_cast<double>(names.size())) + 60;
  const auto at_x = [&](double value) { return kLeft + kWidth * x.At(value); };
  const auto at_y = [&](double value) { return kTop + kHeight * (1 - y.At(value)); };
  std::ofstream out(path);
  const auto text = [&out](double px, double py, const std::string& anchor, const std::string& words,
                           const std::string& more = "") {
    out << "<text x=\"" << px << "\" y=\"" << py << "\" text-anchor=\"" << anchor << "\" " << more << ">"
        << Escaped(words) << "</text>\n";
  };
  const auto line = [&out](double x1, double y1, double x2, double y2, const std::string& style) {
    out << "<line x1=\"" << x1 << "\" y1=\"" << y1 << "\" x2=\"" << x2 << "\" y2=\"" << y2 << "\" " << style << "/>\n";
  };
  out << "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"" << width << "\" height=\"" << height
      << "\" font-family=\"sans-serif\" font-size=\"12\">\n"
      << "<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n";
  text(kLeft + kWidth / 2, 22, "middle", title_, "font-size=\"14\" font-weight=\"bold\"");
  const auto ticks = [this](const Axis& axis, auto draw) {
    const double step = std::log(base_);
    for (int i = static_cast<int>(std::ceil(std::log(axis.low) / step - 1e-9));
         i <= static_cast<int>(std::floor(std::log(axis.high) / step + 1e-9)); ++i) {
      draw(std::pow(base_, i));
    }
  };
  const std::string grid = "stroke=\"#ddd\"";
  ticks(x, [&](double value) {
    line(at_x(value), kTop, at_x(value), kTop + kHeight, grid);
    text(at_x(value), kTop + kHeight + 18, "middle", Number(value));
  });
  ticks(y, [&](double value) {
    line(kLeft, at_y(value), kLeft + kWidth, at_y(value), grid);
    text(kLeft - 8, at_y(value) + 4, "end", Number(value));
  });
  out << "<rect x=\"" << kLeft << "\" y=\"" << kTop << "\" width=\"" << kWidth << "\" height=\"" << kHeight
      << "\" fill=\"none\" stroke=\"#333\"/>\n";
  text(kLeft + kWidth / 2, kTop + kHeight + 42, "middle", x_label_);
  text(0, 0, "middle", y_label_, "transform=\"translate(18 " + Number(kTop + kHeight / 2) + ") rotate(-90)\"");
  for (const auto& [value, name] : marks_) {
    line(at_x(value), kTop, at_x(value), kTop + kHeight, "stroke=\"#333\" stroke-dasharray=\"5 4\"");
    text(at_x(value) - 5, kTop + 14, "end", name);
  }
  const auto colour_of = [&](size_t name) { return std::string(kColours[name % kColours.size()]); };
  for (const Line& line : lines_) {
    const auto name = static_cast<size_t>(std::find(names.begin(), names.end(), line.name) - names.begin());
    out << "<polyline fill=\"none\" stroke-width=\"2\" stroke=\"" << colour_of(name) << "\""
        << (line.dashed ? " stroke-dasharray=\"6 4\"" : "") << " points=\"";
    for (const auto& [px, py] : line.points) out << Number(at_x(px)) << "," << Number(at_y(py)) << " ";
    out << "\"/>\n";
  }
  for (size_t i = 0; i < names.size(); ++i) {
    const double top = kTop + 12 + kLegendLine * static_cast<double>(i);
    line(kLeft + kWidth + 12, top, kLeft + kWidth + 36, top, "stroke-width=\"2\" stroke=\"" + colour_of(i) + "\"");
    text(kLeft + kWidth + kLegendMark, top + 4, "start", names[i]);
  }
  out << "</svg>\n";
  return static_cast<bool>(out.flush());
}

}  // namespace gradwire::bench
