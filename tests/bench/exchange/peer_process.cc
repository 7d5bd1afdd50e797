// See peer_process.h. Parent and child talk in lines over two pipes.
#include "tests/bench/exchange/peer_process.h"

#include <fcntl.h>
#include <sched.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <iostream>

namespace gradwire::bench {
namespace {

void Die(const char* what) {
  std::perror(what);
  std::exit(1);
}

}  // namespace

double OwnCpuSeconds() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](const timeval& t) {
    return static_cast<double>(t.tv_sec) + 1e-6 * static_cast<double>(t.tv_usec);
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

void StayOn(int core) {
  cpu_set_t cores;
  CPU_ZERO(&cores);
  CPU_SET(core, &cores);
  (void)sched_setaffinity(0, sizeof(cores), &cores);
}

PeerProcess::PeerProcess(const std::vector<std::string>& arguments) {
  int down[2];
  int up[2];
  // Not inherited by the peers that are started later: a pipe ends when this process closes it.
  if (pipe2(down, O_CLOEXEC) != 0 || pipe2(up, O_CLOEXEC) != 0) Die("pipe");
  std::vector<char*> argv;
  std::string self = "/proc/self/exe";
  argv.push_back(self.data());
  std::vector<std::string> copies = arguments;
  for (std::string& argument : copies) argv.push_back(argument.data());
  argv.push_back(nullptr);
  pid_ = fork();
  if (pid_ < 0) Die("fork");
  if (pid_ == 0) {
    dup2(down[0], STDIN_FILENO);
    dup2(up[1], STDOUT_FILENO);
    execv(argv[0], argv.data());
    _exit(127);
  }
  close(down[0]);
  close(up[1]);
  to_child_ = down[1];
  from_child_ = up[0];
  address_ = ReadLine();
}

PeerProcess::~PeerProcess() {
  close(to_child_);  // ServePeer returns
  waitpid(pid_, nullptr, 0);
  close(from_child_);
}

std::string PeerProcess::ReadLine() {
  std::string line;
  char c = 0;
  while (read(from_child_, &c, 1) == 1) {
    if (c == '\n') return line;
    line.push_back(c);
  }
  Die("the peer process ended early");
  return line;
}

double PeerProcess::CpuSeconds() {
  if (write(to_child_, "cpu\n", 4) != 4) Die("write to the peer process");
  return std::stod(ReadLine());
}

void ServePeer(const std::string& address) {
  std::printf("%s\n", address.c_str());
  std::fflush(stdout);
  for (std::string line; std::getline(std::cin, line);) {
    std::printf("%.6f\n", OwnCpuSeconds());
    std::fflush(stdout);
  }
}

}  // namespace gradwire::bench
