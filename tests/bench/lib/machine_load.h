// What else the machine did while a benchmark ran: the figures of a busy machine are noise.
#pragma once

#include <string>

namespace gradwire::bench {

// From its construction on. Not thread-safe. Linux; elsewhere it knows nothing.
class MachineLoad {
 public:
  MachineLoad();
  // In cores on average: the user and system time of processes outside of this one's process group, and what the
  // hypervisor gave to others. Empty where unknown; begins with "BUSY" where it is more than kBusyCores.
  std::string Describe() const;

 private:
  static constexpr double kBusyCores = 0.1;

  struct Sample {
    double wall_s = 0;
    double all_s = 0;     // user and system time of the whole machine
    double own_s = 0;     // of the process group, and of its children that have ended
    double stolen_s = 0;  // by the hypervisor
  };
  static Sample Take();

  const Sample begin_;
};

}  // namespace gradwire::bench
