// A folder for the files of one test.
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <string>

#include "absl/strings/str_cat.h"

namespace gradwire::testing_support {

// Empty at first; goes with this, and all that is in it.
class TemporaryFolder {
 public:
  // `name`: of which no other test of the process has one at the same time.
  explicit TemporaryFolder(const std::string& name)
      : path_(absl::StrCat(::testing::TempDir(), "/gradwire-", name, "-", getpid())) {
    std::filesystem::remove_all(path_);
    std::filesystem::create_directories(path_);
  }
  ~TemporaryFolder() { std::filesystem::remove_all(path_); }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;

  const std::string& path() const { return path_; }

 private:
  const std::string path_;
};

}  // namespace gradwire::testing_support
