// A line chart as an SVG file: what a benchmark draws beside its JSON.
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace gradwire::bench {

// Both axes are logarithmic, ticks at powers of `base`. Not thread-safe.
class Plot {
 public:
  Plot(std::string title, std::string x_label, std::string y_label, double base = 10)
      : title_(std::move(title)), x_label_(std::move(x_label)), y_label_(std::move(y_label)), base_(base) {}
  // Points in the order in which they are joined; all coordinates are positive. Lines of one name share a colour.
  void AddLine(std::string name, std::vector<std::pair<double, double>> points, bool dashed = false) {
    lines_.push_back({std::move(name), std::move(points), dashed});
  }
  // A dashed vertical line.
  void AddMark(double x, std::string name) { marks_.emplace_back(x, std::move(name)); }
  // False when the file cannot be written; an empty path writes nothing.
  bool Write(const std::string& path) const;

 private:
  struct Line {
    std::string name;
    std::vector<std::pair<double, double>> points;
    bool dashed;
  };

  std::string title_, x_label_, y_label_;
  double base_;
  std::vector<Line> lines_;
  std::vector<std::pair<double, std::string>> marks_;
};

}  // namespace gradwire::bench
