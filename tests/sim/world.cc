// See world.h.
#include "tests/sim/world.h"

#include <cstdio>

namespace gradwire::sim {

bool World::Step() {
  if (events_.empty()) return false;
  auto next = events_.extract(events_.begin());
  now_ = next.key().first;
  next.mapped()();
  return true;
}

void World::Violate(std::string what) {
  if (violated()) return;
  Trace([&] { return "VIOLATED: " + what; });
  violation_ = std::move(what);
}

void World::Print(const std::string& line) const {
  std::printf("%12.6f  %s\n", static_cast<double>(now_) / static_cast<double>(kSecond), line.c_str());
}

}  // namespace gradwire::sim
