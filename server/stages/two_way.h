// Two-way compression: the mean of a round becomes the update frame that is written, applied and pulled, encoded once
// more with the server's own residual. Of jobs that have an update codec.
#pragma once

#include "server/stages/stage.h"

namespace gradwire {

class TwoWay final : public Stage {
 public:
  explicit TwoWay(Stage* next) : next_(*next) {}
  void Pass(ClosedBucket closed) override;

 private:
  Stage& next_;
};

}  // namespace gradwire
