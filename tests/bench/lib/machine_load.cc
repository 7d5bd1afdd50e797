// See machine_load.h. All of it from /proc (proc(5)).
#include "tests/bench/lib/machine_load.h"

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <sstream>

namespace gradwire::bench {
namespace {

double TickSeconds() { return 1.0 / static_cast<double>(sysconf(_SC_CLK_TCK)); }

// User and system time of one process if it belongs to the process group, else 0.
double GroupSeconds(const std::filesystem::path& process, pid_t group) {
  std::ifstream file(process / "stat");
  std::string stat;
  std::getline(file, stat);
  const size_t name_end = stat.rfind(')');  // a name may hold blanks
  if (name_end == std::string::npos) return 0;
  std::istringstream fields(stat.substr(name_end + 1));
  std::string skipped;
  pid_t its_group = 0;
  double user = 0, system = 0;
  fields >> skipped >> skipped >> its_group;                   // state, parent, group
  for (int field = 6; field < 14; ++field) fields >> skipped;  // up to cmajflt
  fields >> user >> system;
  return its_group == group ? (user + system) * TickSeconds() : 0;
}

double EndedChildrenSeconds() {
  rusage usage{};
  getrusage(RUSAGE_CHILDREN, &usage);
  return static_cast<double>(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) +
         1e-6 * static_cast<double>(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec);
}

}  // namespace

MachineLoad::Sample MachineLoad::Take() {
  Sample sample;
  sample.wall_s = std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
  std::ifstream file("/proc/stat");
  std::string name;
  double user = 0, nice = 0, system = 0, idle = 0, iowait = 0, irq = 0, softirq = 0, steal = 0;
  file >> name >> user >> nice >> system >> idle >> iowait >> irq >> softirq >> steal;
  sample.all_s = (user + nice + system) * TickSeconds();
  sample.stolen_s = steal * TickSeconds();
  sample.own_s = EndedChildrenSeconds();
  std::error_code ignored;
  for (const auto& entry : std::filesystem::directory_iterator("/proc", ignored)) {
    if (std::isdigit(static_cast<unsigned char>(entry.path().filename().string()[0])) != 0)
      sample.own_s += GroupSeconds(entry.path(), getpgrp());
  }
  return sample;
}

MachineLoad::MachineLoad() : begin_(Take()) {}

std::string MachineLoad::Describe() const {
  const Sample now = Take();
  const double wall_s = now.wall_s - begin_.wall_s;
  if (now.all_s == 0 || wall_s <= 0) return "";
  const double others = std::max(0.0, now.all_s - begin_.all_s - (now.own_s - begin_.own_s)) / wall_s;
  const double stolen = (now.stolen_s - begin_.stolen_s) / wall_s;
  char text[160];
  std::snprintf(text, sizeof(text), "%sother processes used %.2f cores, the hypervisor took %.2f",
                others + stolen > kBusyCores ? "BUSY, repeat on a quiet machine: " : "", others, stolen);
  return text;
}

}  // namespace gradwire::bench
