// See coalescing.h.
#include "client/cpp/internal/coalescing.h"

#include <algorithm>

namespace gradwire::client {

void Coalescing::RoundBegan(TimeNs now) {
  const bool soon = (acknowledged_ - made_) * kSoon <= now - began_;
  most_bytes_ = scarce_ && soon ? std::min(most_bytes_ + kStepBytes, kMostBytes) : most_bytes_ / 2;
  began_ = now;
  scarce_ = false;
}

void Coalescing::GradientsMade(TimeNs now, TimeNs took, TimeNs delayed) {
  scarce_ = delayed * kScarce >= took && delayed > 0;
  made_ = acknowledged_ = now;
}

}  // namespace gradwire::client
